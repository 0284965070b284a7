from __future__ import annotations

import numpy as np
import pytest

from zbus.codec import decode, encode
from zbus.errors import ConfigError
from zbus.rl import weights
from zbus.rl.weights import TensorInfo

MODEL = {
    "embed": np.arange(12, dtype=np.float32).reshape(3, 4),
    "head": np.ones((2, 2), np.float32),
    "steps": np.array(7),
    "none": np.empty((0, 3), np.float16),
}


def infos(model):
    """Return the manifest of numpy arrays."""
    return weights.manifest_of((name, array.dtype.name, array.shape) for name, array in model.items())


def test_the_digest_covers_names_dtypes_shapes_and_bytes_but_no_order():
    """Each of them changes it; the order of the tensors does not."""
    found = weights.digest(MODEL)
    assert len(found) == 32
    assert weights.digest(dict(reversed(MODEL.items()))) == found
    changed = MODEL["embed"].copy()
    changed[2, 3] = np.nextafter(changed[2, 3], 100)
    swapped = {**MODEL, "embed": MODEL["head"], "head": MODEL["embed"]}
    others = [
        {**MODEL, "embed": changed},
        {**MODEL, "embed": MODEL["embed"].reshape(4, 3)},
        {**MODEL, "embed": MODEL["embed"].view(np.int32)},
        {name: array for name, array in MODEL.items() if name != "none"},
        {**MODEL, "Head": MODEL["head"]},
        swapped,
    ]
    assert len({found, *map(weights.digest, others)}) == len(others) + 1


def test_an_array_is_hashed_as_it_reads_not_as_it_lies():
    """A transposed view and its contiguous copy have one digest."""
    turned = MODEL["embed"].T
    assert weights.digest({"x": turned}) == weights.digest({"x": np.ascontiguousarray(turned)})


def test_the_digest_of_all_is_made_of_those_of_each(monkeypatch):
    """Only what changed is hashed anew; and tensors of several pieces differ in whichever piece."""
    monkeypatch.setattr(weights, "_PIECE", 16)
    parts = weights.digests(pairs(MODEL))
    assert weights.combine(parts) == weights.digest(MODEL)
    model = {**MODEL, "head": MODEL["head"] + 1}
    parts |= weights.digests(pairs({"head": model["head"]}))
    assert weights.combine(parts) == weights.digest(model)
    last = MODEL["embed"].copy()
    last[-1, -1] += 1
    assert weights.digest({**MODEL, "embed": last}) != weights.digest(MODEL)


def pairs(model):
    """Return what ``digests`` takes."""
    return [(info, model[info.name].tobytes()) for info in infos(model)]


def test_bytes_that_numpy_has_no_dtype_for_are_hashed_as_any():
    """A bfloat16 tensor is its bytes; another count of bytes, or a name twice, is refused."""
    info = TensorInfo("w", "bfloat16", (2, 3))
    data = np.arange(12, dtype=np.uint8)
    assert weights.digest([(info, data)]) != weights.digest([(info._replace(dtype="float16"), data)])
    with pytest.raises(ConfigError, match=r"'w' has 12 bytes, 11 came"):
        weights.digest([(info, data[1:])])
    with pytest.raises(ConfigError, match="'w' has 12 bytes, 12 came"):
        weights.digest([(info, data), (info, data)])


def test_tensors_lie_in_one_buffer_at_aligned_places():
    """Each at a multiple of 64 bytes, in the order of the manifest; a buffer of another size is refused."""
    manifest = infos(MODEL)
    assert weights.offsets(manifest) == [0, 64, 128, 192, 192]
    buffer = np.zeros(weights.nbytes_of(manifest), np.uint8)
    for info, view in weights.views(manifest, buffer):
        view[:] = np.frombuffer(MODEL[info.name].tobytes(), np.uint8)
    assert weights.digest(weights.views(manifest, buffer)) == weights.digest(MODEL)
    for wrong in (buffer[1:], buffer.view(np.int8)):
        with pytest.raises(ConfigError, match="the manifest is of 192 bytes"):
            list(weights.views(manifest, wrong))


def test_a_manifest_travels_and_is_checked_where_it_arrives():
    """It round-trips, also as bare triples; what cannot be names the tensor."""
    manifest = infos(MODEL)
    assert weights.manifest_of(decode(encode(weights.triples_of(manifest)))) == manifest
    for entry, message in {
        ("w", "torch.float32", (1,)): "'w' of dtype 'torch.float32'",
        ("w", "float32", (1, -1)): r"shape \[1, -1\] cannot be",
        ("w", "float32", (1.0,)): r"shape \[1.0\] cannot be",
        manifest[0]: "'embed' stands twice",
    }.items():
        with pytest.raises(ConfigError, match=message):
            weights.manifest_of([*manifest, entry])
