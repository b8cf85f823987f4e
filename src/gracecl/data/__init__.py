"""Data sets as uint8 tensors, decoded once: named sets in their official layouts, any folder of images, any arrays."""

from gracecl.data.arrays import from_arrays
from gracecl.data.dataset import Data
from gracecl.data.domains import from_domains
from gracecl.data.folder import from_folder
from gracecl.data.loading import check, get, load
from gracecl.data.packing import pack
from gracecl.data.shards import from_shards
from gracecl.data.source import Archive, Source
from gracecl.data.streamed import Batches
from gracecl.data.torch_datasets import from_torch

__all__ = [
    "Archive",
    "Batches",
    "Data",
    "Source",
    "check",
    "from_arrays",
    "from_domains",
    "from_folder",
    "from_shards",
    "from_torch",
    "get",
    "load",
    "pack",
]
