"""A data set's own files on disk -> the manifest of its published split.

classes: data sets whose test classes are others than those of training
queries: data sets that say which images ask and which answer
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from training.data import manifest
from training.data.layouts import classes, queries
from training.data.manifest import DataError, Manifest, Row
from training.recipe import Data, Layout

__all__ = ["images_of"]

_LAYOUTS: Mapping[Layout, Callable[[Path], list[Row]]] = {
    Layout.FOLDER: classes.folder,
    Layout.SOP: classes.sop,
    Layout.CUB: classes.cub,
    Layout.CARS: classes.cars,
    Layout.INATURALIST: classes.inaturalist,
    Layout.IN_SHOP: queries.in_shop,
    Layout.DISC: queries.disc,
    Layout.MET: queries.met,
    Layout.WILDLIFE: queries.wildlife,
}


def images_of(data: Data) -> Manifest:
    """The images that a recipe names, in the split that their data set or manifest gives. Raises DataError."""
    if not data.root.is_dir():
        raise DataError(f"data.root is {data.root}, and no folder is there")
    if data.layout is Layout.MANIFEST:
        if data.manifest is None:
            raise DataError("data.layout is manifest, and data.manifest is not given: name the CSV or Parquet file")
        return manifest.read(data.manifest, data.root)
    rows = _LAYOUTS[data.layout](data.root)
    if not rows:
        raise DataError(f"{data.root} holds no images of the layout {data.layout}")
    return manifest.of_rows(data.root, rows, lambda n: f"{data.root} ({data.layout}), image {n + 1}")
