"""Sources that other libraries read: parquet, data sets of Hugging Face, tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.data import TokenFile, load_tokenizer, open_source
from shoal.data.sources.documents import identity, read_files
from shoal.data.tokenizers import FileTokenizer, TransformersTokenizer
from shoal.errors import UsageError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEXTS = [f"text {number}" for number in range(3000)]


def read(name: object, **options: Any) -> list[Any]:
    return [each for _, documents in read_files(str(name), cache="unused", **options) for each in documents]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"number": list(range(3000)), "text": TEXTS}), path)
    return path


def test_rows_of_parquet_are_documents(rows: Path) -> None:
    assert read(rows) == TEXTS
    with pytest.raises(
        UsageError, match=r"row 0 of .*a.parquet has no text in the field 'body'; it has 'number', 'text'"
    ):
        read(rows, field="body")
    rows.write_bytes(rows.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"a.parquet cannot be read: ArrowInvalid"):
        read(rows)


def test_a_row_without_text_is_named(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"row 1 of .*a.parquet has no text"):
        read(tmp_path / "a.parquet")


def test_data_sets_on_disk_and_streams_are_documents(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"text": TEXTS})
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(tmp_path / "splits"))
    assert read(f"hf:{tmp_path}/one") == TEXTS
    assert read(f"hf:{tmp_path}/splits") == TEXTS
    assert read(f"hf:{tmp_path}/splits:test") == TEXTS[:1]
    assert identity(f"hf:{tmp_path}/one") != identity(f"hf:{tmp_path}/splits:test")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert read(f"hf:{tmp_path}/files:train") == TEXTS
    before = identity(f"hf:{tmp_path}/files:train")
    assert identity(f"hf:{tmp_path}/files:train") == before == json.loads(json.dumps(before))
    (tmp_path / "files" / "train.jsonl").write_text('{"text": "another"}')
    assert identity(f"hf:{tmp_path}/files:train") != before  # also under the same name
    with pytest.raises(UsageError, match="splits:none cannot be read"):
        read(f"hf:{tmp_path}/splits:none")
    with pytest.raises(UsageError, match=r"row 0 of hf:.*has no text in the field 'body'"):
        read(f"hf:{tmp_path}/one", field="body")


def made_tokenizer(path: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"text": 0, "</s>": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def test_tokenizers_are_read_saved_and_read_again(tmp_path: Path) -> None:
    made = made_tokenizer(tmp_path / "made.json")
    one = load_tokenizer(made)
    assert isinstance(one, FileTokenizer)
    library = transformers.PreTrainedTokenizerFast(tokenizer_file=str(made), eos_token="</s>", unk_token="?")
    library.chat_template = "{% for each in messages %}{{ each.content }} {% endfor %}"
    library.save_pretrained(str(tmp_path / "folder"))
    other = load_tokenizer(tmp_path / "folder")
    assert isinstance(other, TransformersTokenizer)
    assert other.format_chat([{"role": "user", "content": "text"}, {"role": "assistant", "content": "x"}]) == "text x "
    for tokenizer in (one, other):
        assert list(tokenizer.encode("text x text")) == [0, 2, 0]
        assert (tokenizer.vocab_size, tokenizer.end_of_text) == (3, 1)
        tokenizer.save(tmp_path / "saved" / tokenizer.fingerprint)
        again = load_tokenizer(tmp_path / "saved" / tokenizer.fingerprint)
        assert type(again) is type(tokenizer)
        assert again.fingerprint == tokenizer.fingerprint
    assert one.fingerprint != other.fingerprint
    with pytest.raises(UsageError, match="Transformers finds no tokenizer"):
        TransformersTokenizer(tmp_path / "saved")


def test_rows_are_tokenised_by_processes_and_the_tokenizer_is_kept(tmp_path: Path, rows: Path) -> None:
    made = made_tokenizer(tmp_path / "made.json")
    source = open_source(rows, tokenizer=str(made), cache=tmp_path / "cache", num_workers=2)
    assert isinstance(source, TokenFile)
    assert source.tokens(2999).tolist() == [0, 2, 1]
    made.unlink()
    assert load_tokenizer(source.tokenizer_path).decode([0]) == "text"
