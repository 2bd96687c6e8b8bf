"""The header and the tensors of GGUF files, against the gguf package's own reader."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize

from engine.model.gguf_file import GgufFile

UNPACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0")
CODEBOOKS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4")


def write(path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32, rows: int = 300) -> Path:
    """A file with one matrix of random bytes, [rows, 512], and a smaller one behind it."""
    numbers, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    # Bytes below 64 make float16 scales that are finite and small.
    data = generator.integers(0, 64, (rows, 512 // numbers * size), np.uint8)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_array("llama.some", [3, 1, 4])
    writer.add_float32("llama.float", 0.25)
    writer.add_bool("llama.bool", True)
    writer.add_string("llama.text", "naïve 日本")
    writer.add_token_list(["a", "é", "c"])
    writer.add_token_scores([0.5, 1.0, -1.0])
    writer.add_tensor("matrix", data, raw_dtype=kind)
    writer.add_tensor("vector", np.arange(7, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *UNPACKED, *CODEBOOKS])
def test_tensors_are_what_the_gguf_package_makes_of_them(kind: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", GGMLQuantizationType[kind])
    source = GgufFile(file)
    for tensor in GGUFReader(file).tensors:
        expected = dequantize(tensor.data, tensor.tensor_type)
        found = source.read(tensor.name)
        assert (str(found.dtype), found.shape) == ("float32", expected.shape)
        assert found.flags.writeable
        assert found.tobytes() == expected.tobytes()


def test_the_metadata_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf")
    fields = GGUFReader(file).fields
    assert GgufFile(file).fields == {
        name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")
    }


def test_the_outline_has_all_but_vocabulary_and_weights(tmp_path: Path) -> None:
    source = GgufFile(write(tmp_path / "model.gguf", GGMLQuantizationType.Q6_K))
    source.write_outline(tmp_path / "outline.gguf", vocab_size=7)
    outline = GGUFReader(tmp_path / "outline.gguf")
    assert [tensor.name for tensor in outline.tensors] == ["matrix", "vector"]
    fields = {name: field.contents() for name, field in outline.fields.items() if name[:5] != "GGUF."}
    empty: dict[str, list[str]] = {"tokenizer.ggml.tokens": [], "tokenizer.ggml.scores": []}
    assert fields == {**source.fields, **empty, "llama.vocab_size": 7}
    assert (tmp_path / "outline.gguf").stat().st_size < 1000


def test_numbers_that_cannot_be_unpacked_are_named(tmp_path: Path) -> None:
    source = GgufFile(write(tmp_path / "model.gguf", GGMLQuantizationType.I8))
    with pytest.raises(ValueError, match="its tensor matrix is stored as I8"):
        source.read("matrix")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "empty"),
        (3, "within its header"),
        (40, "within its header"),
        (300, "within its header"),
        (-1, "before the end of its tensor vector"),
        (-20000, "before the end of its tensor matrix"),
    ],
)
def test_a_file_that_is_cut_short_is_refused(size: int, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", rows=100)
    whole = file.read_bytes()
    assert int.from_bytes(whole[8:16], "little") == 2
    padding = -len(np.arange(7, dtype=np.float32).tobytes()) % 32
    file.write_bytes(whole[: size if size >= 0 else size - padding])
    with pytest.raises(ValueError, match=message):
        GgufFile(file)


def test_another_version_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf")
    data = bytearray(file.read_bytes())
    data[4] = 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="version 1"):
        GgufFile(file)


def test_rows_that_do_not_fill_blocks_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    data = file.read_bytes()
    shape = (512).to_bytes(8, "little") + (300).to_bytes(8, "little")
    assert data.count(shape) == 1
    file.write_bytes(data.replace(shape, (500).to_bytes(8, "little") + (300).to_bytes(8, "little")))
    with pytest.raises(ValueError, match="matrix has rows that do not fill blocks of Q8_0"):
        GgufFile(file)
