"""Real photographs to ask with, as files: those that the wheels of scikit-image and scikit-learn ship."""

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from PIL import Image

USUAL_SIZE = (800, 600)
_QUALITY = 90
_SHIPPED = (
    ("skimage", "data/astronaut.png"),
    ("skimage", "data/chelsea.png"),
    ("skimage", "data/coffee.png"),
    ("skimage", "data/motorcycle_left.png"),
    ("skimage", "data/rocket.jpg"),
    ("sklearn", "datasets/images/china.jpg"),
    ("sklearn", "datasets/images/flower.jpg"),
)
_AS_THEY_ARE = ("coffee.png", "china.jpg", "flower.jpg")


def query_pictures() -> dict[str, bytes]:
    """Files by name: every photograph as a JPEG of 800 x 600, and some as they come in the wheel."""
    pictures: dict[str, bytes] = {}
    for package, place in _SHIPPED:
        path = _folder(package) / place
        pictures[f"{path.stem} as JPEG"] = _usual(path)
        if path.name in _AS_THEY_ARE:
            pictures[path.name] = path.read_bytes()
    return pictures


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is not installed: pip install 'roadmatch[demo]'")
    return Path(spec.origin).parent


def _usual(path: Path) -> bytes:
    encoded = BytesIO()
    Image.open(path).convert("RGB").resize(USUAL_SIZE).save(encoded, "JPEG", quality=_QUALITY)
    return encoded.getvalue()
