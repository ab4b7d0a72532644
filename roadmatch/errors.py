"""Every expected failure of the library.

    RoadmatchError
    ├── ImageError
    │   ├── UnsupportedImage       not one of the formats that are read
    │   ├── UnreadableImage        the right format, but broken or outside the rules
    │   └── ImageTooLarge          more bytes or pixels than are read
    ├── BundleError
    │   ├── BundleCorrupt          a file is missing or is not the one the manifest names
    │   └── BundleUnsupported      another format version, or an engine that is not installed
    ├── RuleError
    │   ├── UnknownRule            the bundle has no such operating point
    │   └── UnsupportedRule        the evidence cannot show so small a rate
    ├── NotFound
    │   ├── GalleryNotFound
    │   ├── ItemNotFound
    │   ├── ImageNotFound
    │   ├── BundleNotFound
    │   ├── PictureNotKept         the gallery keeps no pictures, only embeddings
    │   └── JobNotFound
    ├── Conflict
    │   ├── GalleryExists
    │   ├── GalleryChanged         a rule or bundle that the gallery cannot take
    │   ├── VersionMismatch        If-Match names another version
    │   ├── IdempotencyMismatch    the key was used for another request
    │   ├── LastImage              an item keeps at least one image
    │   ├── TooManyImages          an item holds at most 100 images
    │   ├── JobFinished            a job that has ended cannot be cancelled
    │   └── LeaseLost              another worker has the job
    └── StoreError
        ├── StoreUnavailable       the database is locked, full or gone: try again
        │   └── StorageFull        no room for a write
        ├── StoreVersionMismatch   the database was written by another version
        ├── BlobMissing            the bytes of a kept picture are gone
        └── LogGap                 the change log misses entries: the replica opens anew

A wrong argument is a ValueError. HTTP codes are given to these classes in app/problems.py alone.
"""


class RoadmatchError(Exception):
    """An expected failure; its text is one line that names the thing and the mend."""


def code_of(error: RoadmatchError) -> str:
    """The stable name of what went wrong: that of the class, as in gallery-not-found."""
    name = type(error).__name__
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).removeprefix("-")


class ImageError(RoadmatchError):
    """A picture that is not taken."""


class UnsupportedImage(ImageError):
    """Not one of the formats that are read."""


class UnreadableImage(ImageError):
    """The right format, but broken or outside the rules."""


class ImageTooLarge(ImageError):
    """More bytes or pixels than are read."""


class BundleError(RoadmatchError):
    """A model bundle that is not used."""


class BundleCorrupt(BundleError):
    """A file is missing, or is not the one that the manifest names."""


class BundleUnsupported(BundleError):
    """Another format version, or an engine that is not installed."""


class RuleError(RoadmatchError):
    """A rule that cannot be applied."""


class UnknownRule(RuleError):
    """The bundle has no such operating point."""


class UnsupportedRule(RuleError):
    """The evidence cannot show so small a rate."""


class NotFound(RoadmatchError):
    """A name that stands for nothing here."""


class GalleryNotFound(NotFound):
    """No gallery of this name."""


class ItemNotFound(NotFound):
    """No item of this id in the gallery."""


class ImageNotFound(NotFound):
    """No image of this id in the gallery."""


class BundleNotFound(NotFound):
    """No loaded bundle of this id."""


class PictureNotKept(NotFound):
    """The gallery keeps no pictures, only embeddings."""


class JobNotFound(NotFound):
    """No job of this id."""


class Conflict(RoadmatchError):
    """The state of the gallery does not allow it."""


class GalleryExists(Conflict):
    """A gallery of this name is there already."""


class GalleryChanged(Conflict):
    """A rule or bundle that the gallery cannot take."""


class VersionMismatch(Conflict):
    """The item has another version than the caller expects."""


class IdempotencyMismatch(Conflict):
    """The idempotency key was used for another request."""


class LastImage(Conflict):
    """An item keeps at least one image."""


class TooManyImages(Conflict):
    """An item holds at most 100 images."""


class JobFinished(Conflict):
    """The job has ended already."""


class LeaseLost(Conflict):
    """Another worker has the job, or it was ended."""


class StoreError(RoadmatchError):
    """The database does not do its part."""


class StoreUnavailable(StoreError):
    """The database is locked, full or gone for the moment."""


class StorageFull(StoreUnavailable):
    """No room for a write; reading and deleting go on."""


class StoreVersionMismatch(StoreError):
    """The database was written by another version of Roadmatch."""


class BlobMissing(StoreError):
    """The bytes of a kept picture are gone."""


class LogGap(StoreError):
    """The change log misses entries that a replica needs."""
