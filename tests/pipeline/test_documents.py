from pathlib import Path

import pytest

from pipeline.documents import Document, check_inputs, read_rows
from pipeline.errors import UserError
from pipeline.inputs import resolve_inputs


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_a_row_becomes_a_document_with_offsets_in_code_points(tmp_path: Path) -> None:
    text = "Ein Satz steht hier. Ünd nöch einer. "
    (tmp_path / "in.jsonl").write_text(f'\n{{"text": "{text * 5}", "k": 7, "year": 1963}}\n', encoding="utf-8")
    (row,) = read_rows(resolve_inputs([str(tmp_path)]).files[0], id_field="k", keep=("year",))
    document = Document(row, encode)
    assert (document.id, document.source, document.row) == (7, str(tmp_path / "in.jsonl"), 0)
    assert (document.fields, document.unit) == ({"year": 1963}, "code points")
    assert "".join(document.read()) == text * 5
    found = list(document.segments(50))
    assert text * 5 == "".join(segment.text for segment in found)
    for segment in found:
        for start, end in segment.sentences:
            assert (text * 5)[segment.locate(start) : segment.locate(end)] == segment.text[start:end]
    assert list(document.segments(50, start=found[1].end)) == found[2:]


def test_segments_of_white_space_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("Words first." + "\n" * 5000 + "Words last.")
    (row,) = read_rows(resolve_inputs([str(tmp_path)]).files[0])
    found = list(Document(row, encode).segments(100))
    assert all(segment.text.strip() for segment in found)
    assert found[-1].text.endswith("Words last.")
    assert found[-1].end == 12 + 5000 + 11


def test_fields_of_text_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x")
    files = resolve_inputs([str(tmp_path)]).files
    check_inputs(files, "text", None, ())
    with pytest.raises(UserError, match=r"no fields, so --id-field and --keep cannot be used"):
        check_inputs(files, "text", "id", ("year",))


def test_a_row_without_text_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": null}')
    (row,) = read_rows(resolve_inputs([str(tmp_path)]).files[0])
    with pytest.raises(ValueError, match="has no text"):
        list(row.read())
