from __future__ import annotations

import warnings

import pytest
import torch

from weights_engines import model_of
from workers.engines.weights import Publisher, Receiver
from workers.engines.weights.files import FILE
from workers.engines.weights.tensors import as_tensor, bytes_of, info_of, keeps, tensors_of
from zbus import Context, Mesh
from zbus.errors import ConfigError


def publisher(model):
    """Return a publisher on rank 0 of one."""
    return Publisher(Context("actor", 0, 1, Mesh({"dp": 1})), lambda: tensors_of(model))


def piece(made, publisher):
    """Return what a reader of the publication gets."""
    return {"manifest": made["manifest"], "data": publisher._last.data, "full": made["full"]}


def equal(one, other, dtype=None):
    """Tell whether two models have the same weights, cast."""
    mine, theirs = tensors_of(one), tensors_of(other)
    return all(
        torch.equal(tensor.to(dtype if dtype and tensor.is_floating_point() else tensor.dtype), theirs[name])
        for name, tensor in mine.items()
    )


@pytest.fixture
def trained():
    """A model with other weights than it was made with, some of them not of this world."""
    model = model_of(8, 1)
    with torch.no_grad():
        model.body[0].weight[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    model.norm.num_batches_tracked.add_(3)
    return model


def test_shared_tensors_buffers_and_wrappers_have_one_name():
    """Tied weights once, persistent buffers too, and none of the names that DDP or a compiler add."""
    model = model_of(8, 1)
    names = list(tensors_of(model))
    assert names == [
        "none", "embed.weight", "body.0.weight", "body.0.bias", "body.1.weight", "norm.weight", "norm.bias",
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip
    wrapper = torch.nn.Module()  # as a compiled module has its own
    wrapper._orig_mod = model.body
    model.body = wrapper
    assert list(tensors_of(model)) == names


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float64"])
def test_what_was_published_is_taken_over_bit_by_bit(trained, dtype, tmp_path):
    """From memory and from files, in any float dtype, into models of that dtype: the digests of both sides agree."""
    source = publisher(trained)
    made = source.publish(dtype, None, keep=False)
    assert made["full"]
    files = tmp_path / "v1"
    source.save(str(files))
    for take in (lambda r: r.update([piece(made, source)]), lambda r: r.load([str(files)])):
        target = model_of(8, 2).to(getattr(torch, dtype or "float32"))
        receiver = Receiver(lambda: tensors_of(target))  # noqa: B023  # used in this round
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            take(receiver)
        assert receiver.digest(anew=False) == receiver.digest(anew=True) == made["digest"]
        known = {name: tensor for name, tensor in tensors_of(target).items() if name != "body.0.weight"}
        for name, tensor in known.items():
            assert torch.equal(tensor, tensors_of(trained)[name].to(tensor.dtype)), name
        assert torch.isnan(target.body[0].weight[0, 0])


def test_a_wider_model_takes_a_narrower_publication_and_hashes_it_as_it_came(trained):
    """bfloat16 into float32 has the publisher's digest; float32 into bfloat16 would lose bits and is refused."""
    source = publisher(trained)
    made = source.publish("bfloat16", None, keep=False)
    target = model_of(8, 2)
    receiver = Receiver(lambda: tensors_of(target))
    receiver.update([piece(made, source)])
    assert receiver.digest(anew=True) == made["digest"]
    made = source.publish(None, None, keep=False)
    narrow = model_of(8, 2).to(torch.bfloat16)
    with pytest.raises(ConfigError, match="'none' as float32, which the model's bfloat16 cannot hold"):
        Receiver(lambda: tensors_of(narrow)).update([piece(made, source)])
    assert [keeps("float64", "float16"), keeps("float16", "bfloat16"), keeps("int64", "int32")] == [True, False, False]


def test_only_what_changed_is_published_to_who_has_the_rest(trained):
    """Against the digest of the last publication, in the same dtype; else all. The digest is of all tensors."""
    source = publisher(trained)
    target = model_of(8, 2)
    receiver = Receiver(lambda: tensors_of(target))
    first = source.publish(None, None, keep=False)
    receiver.update([piece(first, source)])
    with torch.no_grad():
        trained.head.weight.add_(1)
        trained.norm.bias.add_(1)
    second = source.publish(None, first["digest"], keep=False)
    assert ([name for name, *_ in second["manifest"]], second["full"]) == (["embed.weight", "norm.bias"], False)
    receiver.update([piece(second, source)])
    assert receiver.digest(anew=False) == receiver.digest(anew=True) == second["digest"] != first["digest"]
    third = source.publish(None, second["digest"], keep=False)
    assert (third["manifest"], third["digest"], third["nbytes"]) == ([], second["digest"], 0)
    receiver.update([piece(third, source)])
    assert receiver.digest(anew=False) == second["digest"]
    assert source.publish(None, first["digest"], keep=False)["full"], "not the last one"
    assert source.publish("bfloat16", third["digest"], keep=False)["full"], "another dtype"


def test_who_missed_a_part_has_another_digest(trained):
    """Changed tensors over older weights, and the right ones with a bit flipped, are seen."""
    source = publisher(trained)
    first = source.publish(None, None, keep=False)
    with torch.no_grad():
        trained.head.weight.add_(1)
    second = source.publish(None, first["digest"], keep=False)
    target = model_of(8, 2)
    receiver = Receiver(lambda: tensors_of(target))
    receiver.update([piece(second, source)])
    assert receiver.digest(anew=False) != second["digest"]
    receiver.update([piece(source.publish(None, None, keep=False), source)])
    assert receiver.digest(anew=False) == second["digest"]
    with torch.no_grad():
        target.norm.bias.view(torch.uint8)[5] ^= 1
    assert receiver.digest(anew=True) != second["digest"]


@pytest.mark.parametrize("way", ["memory", "files"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: model_of(16, 1),
            r"has 'body.0.bias' as \[16\], the model as \[8\]|has 'embed.weight' as \[16, 16\], the",
        ),
        (lambda: torch.nn.Sequential(model_of(8, 1)), "holds '0.*', '0.*', '0.*' and 7 more, which the model has not"),
        (lambda: _without(model_of(8, 1), "norm"), "lacks 'norm.weight', 'norm.bias', 'norm.running_mean' and 2 more"),
    ],
    ids=["wider", "renamed", "smaller"],
)
def test_what_does_not_fit_is_refused_before_the_first_write(way, other, message, tmp_path):
    """Unknown names, missing ones and other shapes name the tensor; the model is as it was."""
    source = publisher(other())
    made = source.publish(None, None, keep=False)
    source.save(str(tmp_path / "v1"))
    target = model_of(8, 2)
    receiver = Receiver(lambda: tensors_of(target))
    with pytest.raises(ConfigError, match=message):
        receiver.update([piece(made, source)]) if way == "memory" else receiver.load([str(tmp_path / "v1")])
    assert equal(target, model_of(8, 2))


def _without(model, name):
    delattr(model, name)
    return model


def test_files_are_there_whole_or_not_at_all_and_never_written_again(trained, tmp_path, monkeypatch):
    """A second save of one directory is refused, a failed one leaves nothing, and one that is not there is named."""
    source = publisher(trained)
    with pytest.raises(ConfigError, match="has published no weights"):
        source.save(str(tmp_path / "v1"))
    source.publish(None, None, keep=False)
    source.save(str(tmp_path / "deep" / "v1"))
    before = (tmp_path / "deep" / "v1" / FILE).read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        source.save(str(tmp_path / "deep" / "v1"))
    assert (tmp_path / "deep" / "v1" / FILE).read_bytes() == before
    (tmp_path / "deep" / "v2").write_text("a file in its place")
    with pytest.raises(ConfigError, match="is there already"):
        source.save(str(tmp_path / "deep" / "v2"))
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["v1", "v2"]
    receiver = Receiver(lambda: tensors_of(trained))
    with pytest.raises(ConfigError, match=r"holds no file \*\.safetensors"):
        receiver.load([str(tmp_path / "v3")])
    (tmp_path / "v4").mkdir()
    (tmp_path / "v4" / FILE).write_bytes(before[:-5])
    with pytest.raises(ConfigError, match="is damaged"):
        receiver.load([str(tmp_path / "v4")])


def test_other_peoples_safetensors_are_loaded_too(tmp_path):
    """Several files of one directory together, without a word of ours in them; what is missing is seen."""
    from safetensors.torch import save_file

    source, target = model_of(8, 1), model_of(8, 2)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors_of(source).items()}
    names = list(tensors)
    assert names[4] == "body.1.weight"
    save_file({name: tensors[name] for name in names[:4]}, tmp_path / "model-1.safetensors")
    receiver = Receiver(lambda: tensors_of(target))
    with pytest.raises(ConfigError, match=r"lacks 'body\.1\.weight'"):
        receiver.load([str(tmp_path)])
    save_file({name: tensors[name] for name in names[4:]}, tmp_path / "model-2.safetensors")
    receiver.load([str(tmp_path)])
    assert equal(source, target)


def test_a_dtype_to_cast_to_is_a_floating_point_one():
    """Others are refused by name, before anything is gathered."""
    with pytest.raises(ConfigError, match="cannot be cast to 'int8'"):
        publisher(model_of(8, 1)).publish("int8", None, keep=False)


def test_bytes_and_tensors_are_views_of_each_other():
    """No copy either way, for any dtype that numpy has not."""
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    data = bytes_of(tensor)
    again = as_tensor(info_of("x", tensor), data)
    tensor[1, 2] = 9
    assert torch.equal(again, tensor)
    data.flags.writeable = False
    assert again.data_ptr() == as_tensor(info_of("x", tensor), data).data_ptr()
