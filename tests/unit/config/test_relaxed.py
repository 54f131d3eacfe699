"""JSON as people write it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import load
from shoal.config.relaxed import read
from shoal.errors import ConfigError

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(ANYTHING)
def test_what_the_standard_library_writes_reads_the_same(value: object) -> None:
    assert read(json.dumps(value)).value == value
    assert read(json.dumps(value, indent=2, ensure_ascii=False)).value == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1,}', {"a": 1}),
        ("{a: 1, 'b': [1, 2,],}", {"a": 1, "b": [1, 2]}),
        ('{"a": 1 // one\n, # two\n /* three\n */ "b": 2}', {"a": 1, "b": 2}),
        ('{\n  "a": 1\n  "b": 2\n}', {"a": 1, "b": 2}),
        ('{"a": 2e8, "b": -1.5E-3, "c": Infinity}', {"a": 2e8, "b": -1.5e-3, "c": math.inf}),
        ("{'say \"hi\"': 'it\\'s'}", {'say "hi"': "it's"}),
        ('\ufeff{"a": "\\u00e9"}', {"a": "é"}),
        ("{}", {}),
    ],
)
def test_looser_forms_are_read(text: str, value: object) -> None:
    assert read(text).value == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: text of a line  # of text\nb: 3 # three\nc: true", {"a": "text of a line  # of text", "b": 3, "c": True}),
        ("{\n a: 3 steps\n b: [\n  x\n  2,\n ]\n c: {d: null}\n}", {"a": "3 steps", "b": ["x", 2], "c": {"d": None}}),
        ("name: http://host:1/x\ntext: '''two\nlines'''", {"name": "http://host:1/x", "text": "two\nlines"}),
        ('{"a": 1, "b": [1, 2]}', {"a": 1, "b": [1, 2]}),
    ],
)
def test_hjson_has_text_without_quotes_and_needs_no_braces(text: str, value: object) -> None:
    assert read(text, is_hjson=True).value == value


def test_text_without_quotes_that_ends_its_line_is_read_in_every_file() -> None:
    text = "{type: AdamW\n nvme: {device: nvme, path: /local/nvme\n}\n a: two words \n b: 3}"
    with pytest.raises(ConfigError, match="found 'nvme'"):  # Hjson reads "nvme, path: /local/nvme"
        read(text)
    assert read(text.replace("device: nvme, ", "device: nvme\n")).value == {
        "type": "AdamW",
        "nvme": {"device": "nvme", "path": "/local/nvme"},
        "a": "two words",
        "b": 3,
    }
    with pytest.raises(ConfigError, match="True is Python"):
        read("{a: True\n}")


def test_a_file_is_hjson_by_its_suffix(tmp_path: Path) -> None:
    text = "train_batch_size: 4\noptimizer: {\n  type: AdamW\n  params: {lr: 0.1}\n}\n"
    (tmp_path / "ds.hjson").write_text(text)
    (tmp_path / "ds.json").write_text(text)
    assert load(tmp_path / "ds.hjson").optimizer.type == "AdamW"
    with pytest.raises(ConfigError, match="line 1"):
        load(tmp_path / "ds.json")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the text is empty"),
        ("{", "expected a key, found the end of the text"),
        ('{"a": 1 "b": 2}', "expected a comma or '}'"),
        ('{"a" 1}', "expected ':' after the key 'a'"),
        ('{"a": True}', "True is Python, JSON says true"),
        ('{"a": yes}', "expected a value, found 'yes'"),
        ('{"a": "b}', "a string without its closing quote"),
        ('{"a": "\\x"}', "an escape that JSON does not have"),
        ('{"a": 1} {', "after the end of the value"),
        ("[" * 200, "nested more than 100 deep"),
        ('{"a": 1-2}', "expected a value, found '1-2'"),
    ],
)
def test_what_is_not_json_is_an_error_that_says_where(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, "ds.json")
    assert part in str(caught.value)
    assert "ds.json, line 1, column" in str(caught.value)


def test_a_duplicate_key_is_an_error_with_both_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        read('{\n"fp16": {\n  "enabled": true,\n  "enabled": false}}', "ds.json")
    assert "the key 'fp16.enabled' is on line 3 and again on line 4" in str(caught.value)


def test_every_key_keeps_its_line() -> None:
    lines = read('{\n"a": {\n"b": 1},\n"c": [{\n"d": 2}]}').lines
    assert lines == {("a",): 2, ("a", "b"): 3, ("c",): 4, ("c", 0, "d"): 5}
