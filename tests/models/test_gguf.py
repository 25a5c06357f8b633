"""GGUF: container, weights in half-split order, quantised slices, and damaged files."""

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from distmega.errors import ModelError
from distmega.models.config import RopeScaling
from distmega.models.gguf.file import open_gguf
from distmega.models.presets import PRESETS
from distmega.models.weights.tensors import weight_specs
from distmega.sources.load import ModelSource, open_model
from distmega.sources.locate import locate_model
from tests.models.files import write_gguf

KINDS = gguf.GGMLQuantizationType
QUANTISABLE = replace(PRESETS["tiny-llama"], hidden=64, ffn=96, rope_scaling=RopeScaling())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, PRESETS["tiny-llama"])
    return path


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_families_round_trip(tmp_path: Path, name: str):
    config = replace(PRESETS[name], rope_scaling=RopeScaling(), windows=())
    written = write_gguf(tmp_path / "m.gguf", config)
    source = open_model(str(tmp_path / "m.gguf"))
    architecture = "llama" if name == "tiny-mistral" else config.architecture
    assert source.config == replace(config, architecture=architecture, eos_ids=(258,))
    for weight, values in written.items():
        np.testing.assert_array_equal(source.weight(weight).read(), values, err_msg=weight)


@pytest.mark.parametrize("kind", [KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1])
def test_slices_of_quantised_weights(tmp_path: Path, kind: gguf.GGMLQuantizationType):
    written = write_gguf(tmp_path / "m.gguf", QUANTISABLE, kind=kind)
    source = open_model(str(tmp_path / "m.gguf"))
    rng = np.random.default_rng(0)
    for name in ("embed", "norm", "layers.1.wq", "layers.0.wk", "layers.0.wo", "layers.1.w_down"):
        reader, values = source.weight(name), written[name]
        np.testing.assert_array_equal(reader.read(), values, err_msg=name)
        for _ in range(10):
            ends = [sorted(rng.integers(0, extent + 1, 2).tolist()) for extent in reader.shape]
            part = tuple(slice(*bounds) for bounds in ends)
            np.testing.assert_array_equal(reader.read(part), values[part], err_msg=f"{name} {part}")


@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.F16, KINDS.Q8_0])
def test_what_is_read_may_be_written_and_the_file_stays(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
):
    write_gguf(tmp_path / "m.gguf", QUANTISABLE, kind=kind)
    file = open_gguf(tmp_path / "m.gguf")
    for name, tensor in file.tensors.items():
        whole = tuple((0, extent) for extent in tensor.shape)
        first = file.read(tensor, whole)
        kept = first.copy()
        first += 1
        np.testing.assert_array_equal(file.read(tensor, whole), kept, err_msg=name)


def test_container_agrees_with_the_package(tiny: Path):
    ours, theirs = open_gguf(tiny), gguf.GGUFReader(tiny)
    for key, value in ours.metadata.data.items():
        field = theirs.get_field(key)
        assert field is not None
        expected = field.contents()
        assert value == (pytest.approx(expected) if isinstance(value, float) else expected)
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.offset, mine.stop) == (tensor.data_offset, tensor.data_offset + tensor.n_bytes)
        assert mine.shape == tuple(tensor.shape[::-1].tolist())


def test_rope_factors(tmp_path: Path):
    config, factors = PRESETS["tiny-qwen3"], (1.0,) * 4 + (8.0,) * 4
    write_gguf(tmp_path / "m.gguf", config, rope_factors=factors)
    source = open_model(str(tmp_path / "m.gguf"))
    assert source.config.rope_scaling == RopeScaling(kind="factors", factors=factors)


def test_smollm2_weights_have_logical_shapes(smollm2: ModelSource):
    for spec in weight_specs(smollm2.config).values():
        assert smollm2.weight(spec.name).shape == spec.shape
    wq = smollm2.weight("layers.3.wq")
    assert wq.shape == (3, 3, 64, 576)
    np.testing.assert_array_equal(wq.read((slice(1, 2),)), wq.read()[1:2])
    down = smollm2.weight("layers.3.w_down")
    half = (slice(None), slice(768, 1536))
    np.testing.assert_array_equal(down.read(half), down.read()[half])


def test_cut_anywhere(tiny: Path, tmp_path: Path):
    data = tiny.read_bytes()
    end = max(tensor.stop for tensor in open_gguf(tiny).tensors.values())
    rng = random.Random(0)
    for cut in [0, 3, *(rng.randrange(end) for _ in range(20))]:
        path = tmp_path / f"{cut}.gguf"
        path.write_bytes(data[:cut])
        with pytest.raises(ModelError, match=rf"{cut}\.gguf"):
            open_model(str(path))


def test_cut_of_the_real_file(tmp_path: Path):
    source, path = locate_model("smollm2").path, tmp_path / "cut.gguf"
    shutil.copyfile(source, path)
    rng = random.Random(1)
    cuts = [path.stat().st_size - 1000, *(rng.randrange(path.stat().st_size) for _ in range(4))]
    for cut in sorted([*cuts, 900_000, 100], reverse=True):
        with path.open("r+b") as file:
            file.truncate(cut)
        with pytest.raises(ModelError, match=r"cut\.gguf ends at byte"):
            open_model(str(path))


def test_damaged_bytes_never_escape_as_other_errors(tiny: Path, tmp_path: Path):
    data = tiny.read_bytes()
    start = min(tensor.offset for tensor in open_gguf(tiny).tensors.values())
    rng = random.Random(2)
    num_refused = 0
    path = tmp_path / "damaged.gguf"
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(start)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            open_model(str(path)).tokenizer()
        except ModelError:
            num_refused += 1
    assert num_refused > 50


def test_missing_tensor(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", PRESETS["tiny-qwen2"], drop="layers.1.wk")
    with pytest.raises(ModelError, match=r"lacks 1 of 26 weights: blk\.1\.attn_k\.weight"):
        open_model(str(tmp_path / "m.gguf"))


def test_unexpected_shape(tmp_path: Path):
    path = tmp_path / "m.gguf"
    write_gguf(path, PRESETS["tiny-qwen3"])
    data, key = path.read_bytes(), b"qwen3.feed_forward_length"
    at = data.index(key) + len(key) + 4
    assert data[at] == 80
    path.write_bytes(data[:at] + bytes([81]) + data[at + 1 :])
    with pytest.raises(
        ModelError, match=r"ffn_\w+\.weight .* has shape \[80, 48\]; expected \[81, 48\]"
    ):
        open_model(str(path))


def test_unknown_architecture(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelError,
        match=r"'mamba' .*; expected one of llama, qwen2, qwen3; use .* Hugging Face folder",
    ):
        open_model(str(tmp_path / "m.gguf"))


def test_a_part_of_a_model_is_named(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m-00002-of-00003.gguf", "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"00003\.gguf is part 2 of 3; .*gguf-split --merge"):
        open_model(tmp_path / "m-00002-of-00003.gguf")


def test_not_gguf(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"not a model at all")
    with pytest.raises(ModelError, match="does not start with GGUF"):
        open_model(str(tmp_path / "m.gguf"))


def changed_word(path: Path, before: bytes, old: int, new: int, width: int) -> None:
    """Replaces the number that stands behind some bytes."""
    data = bytearray(path.read_bytes())
    at = data.index(before) + len(before)
    assert int.from_bytes(data[at : at + width], "little") == old
    data[at : at + width] = new.to_bytes(width, "little")
    path.write_bytes(data)


def offset_of(path: Path, name: str) -> tuple[bytes, int]:
    """What stands in the table before a tensor's offset, and the offset in the data part."""
    data, key = path.read_bytes(), name.encode()
    at = data.index(len(key).to_bytes(8, "little") + key) + 8 + len(key)
    num_dims = int.from_bytes(data[at : at + 4], "little")
    end = at + 4 + 8 * num_dims + 4
    return data[at - len(key) : end], int.from_bytes(data[end : end + 8], "little")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (-32, "tensors '.*' and 'blk.1.attn_norm.weight' overlap"),
        (+4, "tensor 'blk.1.attn_norm.weight' at offset .*; expected a multiple of 32"),
    ],
)
def test_tensors_lie_apart_and_aligned(tiny: Path, tmp_path: Path, change: int, named: str):
    path = Path(shutil.copy(tiny, tmp_path / "m.gguf"))
    before, offset = offset_of(path, "blk.1.attn_norm.weight")
    changed_word(path, before, offset, offset + change, 8)
    with pytest.raises(ModelError, match=named):
        open_model(path)


@pytest.mark.parametrize("alignment", [0, 3, 48])
def test_an_alignment_is_a_power_of_two(tmp_path: Path, alignment: int):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert open_gguf(tmp_path / "m.gguf").tensors == {}
    key = b"general.alignment" + (4).to_bytes(4, "little")
    changed_word(tmp_path / "m.gguf", key, 64, alignment, 4)
    with pytest.raises(ModelError, match=f"alignment {alignment}; expected .* a power of two"):
        open_gguf(tmp_path / "m.gguf")


def test_an_array_is_bounded_before_it_is_read(tmp_path: Path):
    path = tmp_path / "m.gguf"
    numbers = b"".join(n.to_bytes(size, "little") for n, size in ((3, 4), (0, 8), (1, 8), (1, 8)))
    kinds = b"".join(n.to_bytes(size, "little") for n, size in ((9, 4), (0, 4), (2**33, 8)))
    path.write_bytes(b"GGUF" + numbers + b"k" + kinds)
    with path.open("r+b") as file:
        file.truncate(2**33 + 2**10)  # a sparse file: it takes no room
    with pytest.raises(ModelError, match=f"{2**33} items at byte .*; expected at most {2**24}"):
        open_gguf(path)


def test_a_pipe_is_no_file(tmp_path: Path):
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="is not a file"):
        open_model(tmp_path / "m.gguf")
