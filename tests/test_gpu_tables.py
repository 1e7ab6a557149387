"""The page of GPU figures is made from the results file, and a difference is noticed."""

import json

import pytest

from asv_benches import gpu_tables


@pytest.fixture
def results():
    return json.loads(gpu_tables.RESULTS.read_text())


def test_the_page_is_what_was_measured(results):
    assert gpu_tables.PAGE.read_text() == gpu_tables.page(results)


def test_every_figure_is_on_it(results):
    text = gpu_tables.page(results)
    for section, found in results.items():
        assert found["stamp"]["commit"][:12] in text
        for line in found.get("lines", []):
            assert f"| {line['what']} | {gpu_tables.figure(line['value'])} " in text, section
        for trace in found.get("traces", []):
            assert f"{trace['results']['arenapy']['ratio']:.3f}" in text


def test_another_figure_is_another_page(results):
    line = results["latency"]["lines"][0]
    line["value"] *= 2
    assert gpu_tables.page(results) != gpu_tables.PAGE.read_text()
    line["verdict"] = "MISSED"
    assert "**no**" in gpu_tables.page({"latency": results["latency"]})


def test_code_that_has_changed_since_is_named(monkeypatch, tmp_path):
    assert gpu_tables.changed_since("no such commit") is None
    monkeypatch.setattr(gpu_tables, "ROOT", tmp_path)
    assert gpu_tables.changed_since("HEAD") is None, "no repository"
