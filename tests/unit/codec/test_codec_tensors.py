from __future__ import annotations

import warnings

import pytest

from exactness import same
from zbus.codec import decode, encode
from zbus.errors import CodecError

torch = pytest.importorskip("torch")

NAMES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]
DTYPES = [name for name in NAMES if hasattr(torch, name)]


def _filled(name, shape):
    dtype = getattr(torch, name)
    count = 1
    for dimension in shape:
        count *= dimension
    if not count:
        return torch.empty(0, dtype=torch.uint8).view(dtype).reshape(shape)
    high = 2 if name == "bool" else 256
    raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (17, 64), (3, 5, 64)], ids=str)
def test_tensor_of_every_dtype_and_shape_comes_back_bit_for_bit(name, shape):
    """Every dense dtype arrives with its bits, never widened, zeroed or turned into something else (B11)."""
    value = _filled(name, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = decode(encode([value]))[0]
    assert back.dtype is value.dtype
    assert back.shape == value.shape
    assert same(back, value)
    assert back.is_contiguous()


def test_bfloat16_costs_two_bytes_a_number_on_the_wire():
    """A bf16 tensor is not widened for the journey."""
    frames = encode(torch.zeros(1000, dtype=torch.bfloat16))
    assert sum(len(frame) for frame in frames) < 2050


def test_views_arrive_as_their_content():
    """Strided, transposed, expanded, conjugated and negated views arrive as what they show."""
    base = torch.arange(2400.0).reshape(40, 60)
    spectrum = torch.view_as_complex(base.reshape(40, 30, 2))
    for view in (base[::2, ::3], base.T, base[:, 5], base[0].expand(5, 60), spectrum.conj(), spectrum.conj().imag):
        assert same(decode(encode(view)), view.contiguous().resolve_conj().resolve_neg())


def test_gradient_and_parameter_arrive_as_plain_tensors():
    """A tensor that requires a gradient arrives detached; the sender's is untouched."""
    value = torch.nn.Parameter(torch.ones(300))
    back = decode(encode({"w": value, "y": value * 2}))
    assert type(back["w"]) is torch.Tensor
    assert not back["w"].requires_grad
    assert not back["y"].requires_grad
    assert value.requires_grad


def test_decoded_tensor_can_be_changed_without_touching_the_sender():
    """In-place work on an arrived tensor is safe: nothing else shares its memory."""
    for count in (10, 1000):
        value = torch.zeros(count)
        frames = encode(value)
        back = decode(frames)
        back.add_(1)
        assert value.sum() == 0
        assert decode(frames).sum() == 0


def test_owned_frames_are_used_in_place_and_misaligned_ones_are_not():
    """With ``owned`` a writable frame becomes the tensor's memory if its address allows."""
    body, buffer = encode(torch.arange(1000.0))
    frame = bytearray(buffer)
    back = decode([body, frame], owned=True)
    back[0] = 5
    assert memoryview(frame).cast("f")[0] == 5
    shifted = memoryview(bytearray(1 + len(buffer)))[1:]
    shifted[:] = buffer
    moved = decode([body, shifted], owned=True)
    assert moved.data_ptr() % 4 == 0
    assert torch.equal(moved, torch.arange(1000.0))


def test_small_torch_words_arrive_as_themselves():
    """Sizes, dtypes and devices travel."""
    value = [torch.Size([2, 3]), torch.Size([]), torch.device("cpu"), torch.device("cuda", 1), torch.float8_e5m2]
    assert same(decode(encode(value)), value)


def test_state_dict_arrives_in_order():
    """A module's ``state_dict`` arrives as an ordered dict of tensors."""
    state = torch.nn.Linear(40, 30).state_dict()
    assert same(decode(encode(state)), state)


class _Child(torch.Tensor):
    pass


@pytest.mark.parametrize("case", ["sparse", "csr", "meta", "quantised", "nested", "subclass", "generator"])
def test_tensor_that_is_more_than_dense_numbers_is_refused(case):
    """Sparse, quantised, nested, meta and subclassed tensors are refused with path and remedy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "csr": lambda: torch.eye(3).to_sparse_csr(),
            "meta": lambda: torch.empty(3, device="meta"),
            "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "subclass": lambda: torch.ones(3).as_subclass(_Child),
            "generator": torch.Generator,
        }[case]()
        with pytest.raises(CodecError) as caught:
            encode([{"t": value}])
    assert caught.value.path == "$[0]['t']"
    assert caught.value.hint


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_tensor_of_an_accelerator_arrives_on_the_cpu():
    """A tensor on a device is copied to the CPU; its dtype and bits are kept."""
    value = torch.arange(1000, device="cuda", dtype=torch.bfloat16)
    back = decode(encode(value))
    assert back.device.type == "cpu"
    assert torch.equal(back, value.cpu())
