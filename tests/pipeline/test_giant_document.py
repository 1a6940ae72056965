"""A document that is alone must not pay a pass over the weights for every token of its notes."""

from pathlib import Path

from tests.benchmarks.giant_document import measure, write_endless_model

TOKENS, NOTE = 20_000, 64


def test_notes_are_written_together(tmp_path: Path) -> None:
    cost = measure(write_endless_model(tmp_path / "model"), TOKENS, NOTE)
    assert cost.document_tokens >= TOKENS
    assert cost.segments >= TOKENS // 1000
    assert cost.asks > cost.segments  # each has its note, and notes are merged
    assert cost.generated == cost.asks * NOTE
    assert cost.passes >= cost.reading_passes
    assert cost.ratio <= 0.25
