"""training.data.layouts: each data set's own files, made here in small, give its published split."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from training.data.layouts import images_of
from training.data.manifest import DataError, Manifest, Split
from training.recipe import Data, Layout


def put(root: Path, **files: str) -> None:
    """Text files by their path, `__` for / and with the suffix that follows the last `_`."""
    for name, text in files.items():
        path = root / ".".join(name.replace("__", "/").rsplit("_", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def touch(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"picture")


def read(root: Path, layout: Layout) -> Manifest:
    given = images_of(Data(root=root, layout=layout))
    assert given.root == root
    return given


def described(given: Manifest) -> list[str]:
    """Each image as `path label split roles category`, roles being q, g or both."""
    return [
        f"{path} {label or '-'} {split} {'q' * bool(asks)}{'g' * bool(answers) or ''} {category or '-'}".replace(
            "  ", " - "
        )
        for path, label, split, asks, answers, category in zip(
            given.paths, given.labels, given.splits, given.is_query, given.is_gallery, given.categories, strict=True
        )
    ]


def refusal(root: Path, layout: Layout) -> str:
    with pytest.raises(DataError) as refused:
        read(root, layout)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_sub_folders_are_classes_and_what_is_no_picture_is_passed_over(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "owl/b.JPG",
        "owl/a.png",
        "owl/more/c.webp",
        "cat/1.jpeg",
        "cat/notes.txt",
        "cat/.hidden.jpg",
        ".x/a.jpg",
    )
    assert described(read(tmp_path, Layout.FOLDER)) == [
        "cat/1.jpeg cat train qg -",
        "owl/a.png owl train qg -",
        "owl/b.JPG owl train qg -",
        "owl/more/c.webp owl train qg -",
    ]


def test_folders_that_are_not_of_classes_are_refused(tmp_path: Path) -> None:
    assert "holds no images of the layout folder" in refusal(tmp_path, Layout.FOLDER)
    touch(tmp_path, "train/a/1.jpg", "test/b/2.jpg")
    assert "are test, train, and not classes" in refusal(tmp_path, Layout.FOLDER)
    touch(tmp_path, "1.jpg")
    assert "1 pictures outside of a sub-folder (1.jpg)" in refusal(tmp_path, Layout.FOLDER)
    assert "no folder is there" in refusal(tmp_path / "none", Layout.FOLDER)


def test_a_manifest_is_read_where_the_recipe_names_one(tmp_path: Path) -> None:
    put(tmp_path, list_csv="path,label\na.jpg,a\n")
    data = Data(root=tmp_path, layout=Layout.MANIFEST, manifest=tmp_path / "list.csv")
    assert described(images_of(data)) == ["a.jpg a train qg -"]
    assert "data.manifest is not given" in refusal(tmp_path, Layout.MANIFEST)


def test_sop(tmp_path: Path) -> None:
    header = "image_id class_id super_class_id path\n"
    put(tmp_path, Ebay_train_txt=header + "1 1 1 bicycle_final/111_0.JPG\n2 1 1 bicycle_final/111_1.JPG\n")
    assert "Ebay_test.txt cannot be read" in refusal(tmp_path, Layout.SOP)
    put(tmp_path, Ebay_test_txt=header + "59552 11319 12 toaster_final/999_0.JPG\n")
    assert described(read(tmp_path, Layout.SOP)) == [
        "bicycle_final/111_0.JPG 1 train qg 1",
        "bicycle_final/111_1.JPG 1 train qg 1",
        "toaster_final/999_0.JPG 11319 test qg 12",
    ]
    put(tmp_path, Ebay_test_txt=header + "59552 11319 12\n")
    assert "Ebay_test.txt line 2: 4 words are needed, and there are 3" in refusal(tmp_path, Layout.SOP)


def test_cub(tmp_path: Path) -> None:
    put(
        tmp_path,
        images_txt="1 001.Albatross/a.jpg\n2 100.Pelican/b.jpg\n3 101.Pelican/c.jpg\n",
        image_class_labels_txt="1 1\n2 100\n3 101\n",
    )
    assert described(read(tmp_path, Layout.CUB)) == [
        "images/001.Albatross/a.jpg 1 train qg -",
        "images/100.Pelican/b.jpg 100 train qg -",
        "images/101.Pelican/c.jpg 101 test qg -",
    ]
    put(tmp_path, image_class_labels_txt="1 1\n2 100\n")
    assert "has no class for image 3" in refusal(tmp_path, Layout.CUB)


def annotations(path: Path, name: str, *images: tuple[str, int]) -> None:
    """A MATLAB file with a struct array, as the data set has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.zeros((1, len(images)), dtype=[("bbox_x1", object), ("class", object), (name, object)])
    for n, (image, number) in enumerate(images):
        array[0, n] = (39, number, image)
    scipy.io.savemat(path, {"annotations": array})


def test_cars_in_its_first_form(tmp_path: Path) -> None:
    images = [("car_ims/000001.jpg", 1), ("car_ims/008000.jpg", 98), ("car_ims/008055.jpg", 99)]
    annotations(tmp_path / "cars_annos.mat", "relative_im_path", *images)
    assert described(read(tmp_path, Layout.CARS)) == [
        "car_ims/000001.jpg 1 train qg -",
        "car_ims/008000.jpg 98 train qg -",
        "car_ims/008055.jpg 99 test qg -",
    ]


@pytest.mark.parametrize("inside", ["", "devkit"])
def test_cars_in_two_folders_is_split_by_class_and_not_by_folder(tmp_path: Path, inside: str) -> None:
    annotations(tmp_path / "devkit" / "cars_train_annos.mat", "fname", ("00001.jpg", 14), ("00002.jpg", 196))
    annotations(tmp_path / inside / "cars_test_annos_withlabels.mat", "fname", ("00001.jpg", 98))  # one, squeezed
    assert described(read(tmp_path, Layout.CARS)) == [
        "cars_train/00001.jpg 14 train qg -",
        "cars_train/00002.jpg 196 test qg -",
        "cars_test/00001.jpg 98 train qg -",
    ]


def test_annotations_of_cars_that_are_not_there_or_broken_are_refused(tmp_path: Path) -> None:
    assert "cars_train_annos.mat cannot be read" in refusal(tmp_path, Layout.CARS)
    touch(tmp_path, "cars_annos.mat")
    assert "cars_annos.mat holds no annotations with relative_im_path and class" in refusal(tmp_path, Layout.CARS)
    annotations(tmp_path / "cars_annos.mat", "fname", ("1.jpg", 1))
    assert "holds no annotations with relative_im_path" in refusal(tmp_path, Layout.CARS)


def test_inaturalist(tmp_path: Path) -> None:
    put(
        tmp_path,
        Inat_dataset_splits__Inaturalist_train_set1_txt="train_val2018/Aves/3003/a.jpg\ntrain_val2018/Plantae/5/b.jpg\n",
        Inat_dataset_splits__Inaturalist_test_set1_txt="train_val2018/Aves/3004/c.jpg\n",
    )
    assert described(read(tmp_path, Layout.INATURALIST)) == [
        "train_val2018/Aves/3003/a.jpg 3003 train qg Aves",
        "train_val2018/Plantae/5/b.jpg 5 train qg Plantae",
        "train_val2018/Aves/3004/c.jpg 3004 test qg Aves",
    ]


IN_SHOP = """image_name item_id evaluation_status
img/WOMEN/Dresses/id_00000002/02_1_front.jpg     id_00000002 train
img/MEN/Denim/id_00000007/01_1_front.jpg         id_00000007 query
img/MEN/Denim/id_00000007/01_3_back.jpg          id_00000007 gallery
"""


@pytest.mark.parametrize(("place", "images"), [("Eval/", "Img/"), ("", "")])
def test_in_shop(tmp_path: Path, place: str, images: str) -> None:
    touch(tmp_path, f"{images}img/WOMEN/a.jpg", f"{place}list_eval_partition.txt")
    (tmp_path / place / "list_eval_partition.txt").write_text("3\n" + IN_SHOP)
    given = read(tmp_path, Layout.IN_SHOP)
    assert described(given) == [
        f"{images}img/WOMEN/Dresses/id_00000002/02_1_front.jpg id_00000002 train qg WOMEN/Dresses",
        f"{images}img/MEN/Denim/id_00000007/01_1_front.jpg id_00000007 test q MEN/Denim",
        f"{images}img/MEN/Denim/id_00000007/01_3_back.jpg id_00000007 test g MEN/Denim",
    ]
    assert given.gallery(Split.TEST).tolist() == [2]
    (tmp_path / place / "list_eval_partition.txt").write_text("52712\n" + IN_SHOP)
    assert "says that it lists 52712 images, and it lists 3" in refusal(tmp_path, Layout.IN_SHOP)


def test_disc(tmp_path: Path) -> None:
    touch(tmp_path, "train/T000000.jpg", "references/R000001.jpg", "references/R000002.jpg", "references/notes.jpg")
    touch(tmp_path, "dev_queries/Q00007.jpg", "dev_queries/Q00008.jpg", "final_queries/Q50000.jpg")
    assert "holds no *groundtruth*.csv" in refusal(tmp_path, Layout.DISC)
    put(
        tmp_path,
        dev_queries_groundtruth_csv="query_id,reference_id\nQ00007,R000002\nQ00008,\n",
        test_queries_groundtruth_csv="Q50000,R000001\n",
    )
    given = read(tmp_path, Layout.DISC)
    assert described(given) == [
        "dev_queries/Q00007.jpg R000002 validation q -",
        "dev_queries/Q00008.jpg - validation q -",
        "final_queries/Q50000.jpg R000001 test q -",
        "references/R000001.jpg R000001 test g -",
        "references/R000002.jpg R000002 test g -",
        "train/T000000.jpg T000000 train - -",
    ]
    assert given.gallery(Split.VALIDATION).tolist() == given.gallery(Split.TEST).tolist() == [3, 4]
    put(tmp_path, test_queries_groundtruth_csv="Q50000,R000003\n")
    assert "lacks 1 images of the ground truth (R000003)" in refusal(tmp_path, Layout.DISC)
    put(tmp_path, test_queries_groundtruth_csv="Q50000,R000001\nQ50000,R000002\n")
    assert "Q50000 has two references" in refusal(tmp_path, Layout.DISC)
    put(tmp_path, test_queries_groundtruth_csv="Q50000;R000001\n")
    assert "line 1: query,reference is needed" in refusal(tmp_path, Layout.DISC)


@pytest.mark.parametrize(("lists", "images"), [("ground_truth", "images/"), ("", "")])
def test_met(tmp_path: Path, lists: str, images: str) -> None:
    touch(tmp_path, f"{images}MET/5/0.jpg")
    entries = {
        "MET_database": [{"id": 5, "path": "MET/5/0.jpg"}, {"id": 6, "path": "MET/6/0.jpg"}],
        "valset": [{"path": "test_met/aa.jpg", "MET_id": 6}],
        "testset": [{"path": "test_met/ab.jpg", "MET_id": 5}, {"path": "test_noart/ac.jpg", "url": "u"}],
    }
    (tmp_path / lists).mkdir(exist_ok=True)
    for name, listed in entries.items():
        (tmp_path / lists / f"{name}.json").write_text(json.dumps(listed))
    given = read(tmp_path, Layout.MET)
    assert described(given) == [
        f"{images}MET/5/0.jpg 5 train g -",
        f"{images}MET/6/0.jpg 6 train g -",
        f"{images}test_met/aa.jpg 6 validation q -",
        f"{images}test_met/ab.jpg 5 test q -",
        f"{images}test_noart/ac.jpg - test q -",
    ]
    assert given.gallery(Split.TEST).tolist() == [0, 1]
    (tmp_path / lists / "testset.json").write_text('[{"MET_id": 5}]')
    assert "testset.json: an entry has no path or id" in refusal(tmp_path, Layout.MET)
    (tmp_path / lists / "testset.json").write_text('{"a": 1}')
    assert "testset.json is no JSON list" in refusal(tmp_path, Layout.MET)


@pytest.mark.parametrize("prefix", ["", "images/"])
def test_wildlife(tmp_path: Path, prefix: str) -> None:
    touch(tmp_path, "images/ATRW/1.jpg")
    inside = "" if prefix else "images/"  # an older release leaves the folder out
    with (tmp_path / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ["image_id", "identity", "path", "date", "dataset", "species", "split"],
                [0, "12", f"{inside}ATRW/1.jpg", "", "ATRW", "tiger", "train"],
                [1, "12", f"{inside}ATRW/2.jpg", "", "ATRW", "tiger", "test"],
                [2, "12", f"{inside}ZindiTurtle/3.jpg", "", "ZindiTurtle", "turtle", "test"],
                [3, "unknown", f"{inside}ZindiTurtle/4.jpg", "", "ZindiTurtle", "turtle", "test"],
            ]
        )
    given = read(tmp_path, Layout.WILDLIFE)
    assert described(given) == [
        "images/ATRW/1.jpg ATRW/12 train qg ATRW",
        "images/ATRW/2.jpg ATRW/12 test q ATRW",
        "images/ZindiTurtle/3.jpg ZindiTurtle/12 test q ZindiTurtle",
        "images/ZindiTurtle/4.jpg - test q ZindiTurtle",
    ]
    assert given.gallery(Split.TEST).tolist() == [0]
    put(tmp_path, metadata_csv="identity,path,dataset,split\na,a.jpg,b,val\n")
    assert "line 2: split is 'val'" in refusal(tmp_path, Layout.WILDLIFE)
    put(tmp_path, metadata_csv="identity,path,split\na,a.jpg,train\n")
    assert "no column dataset" in refusal(tmp_path, Layout.WILDLIFE)
