"""Timelines: the macros in machine code, records to spans, and the pictures. Needs no GPU."""

import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from blazeproto import gemm
from blazeproto.gemm import product
from blazeproto.gemm.compile import CUDA_SOURCES, compile_many
from blazeproto.lab import timeline
from blazeproto.lab.marks import marked
from blazeproto.lab.timeline import LOOKS, RECORDS, WARPS, WHATS, compiled_in, parse, record
from tests.refusals import refuses

BEGIN, END, AT = 0x100, 0x200, 0x300
NEAR_THE_WRAP = 2**32 - 3000
Record = tuple[int, int]


# Marks of a warp: cycles after the one before, edge, what.
FIRST = (
    *((0, AT, "tile"), (0, BEGIN, "mma"), (0, BEGIN, "wait full"), (100, END, "wait full"), (1600, END, "mma")),
    *((0, BEGIN, "hand-over"), (300, END, "hand-over")),
)
LATER = (  # the tile before is handed over under the products
    *((0, AT, "tile"), (0, BEGIN, "mma"), (0, BEGIN, "wait full"), (100, END, "wait full")),
    *((400, BEGIN, "hand-over"), (200, END, "hand-over"), (1000, END, "mma")),
    *((0, BEGIN, "hand-over"), (300, END, "hand-over")),
)
LOADED = (
    *((0, AT, "tile"), (0, BEGIN, "wait empty"), (1500, END, "wait empty")),
    *((0, BEGIN, "TMA"), (100, END, "TMA"), (0, BEGIN, "copy"), (400, END, "copy")),
)
CONSUMER = ((0, BEGIN, "consumer"), *FIRST, *3 * LATER, (0, END, "consumer"))
PRODUCER = ((0, BEGIN, "producer"), *4 * LOADED, (0, END, "producer"))
IDLE = ((10, BEGIN, "epilogue"), (10, END, "epilogue"))


def records(marks: Sequence[tuple[int, int, str]], clock: int = 0) -> list[Record]:
    """As a warp would leave them that begins at this clock."""
    clocks = [clock + passed for passed in accumulate(after for after, _, _ in marks)]
    return [(at % 2**32, edge | WHATS.index(what)) for at, (_, edge, what) in zip(clocks, marks, strict=True)]


@pytest.fixture
def picture() -> timeline.Timeline:
    """A producer, an idle warp, one without records, a consumer; their clocks wrap, and the consumer's begins first."""
    start = NEAR_THE_WRAP
    warps = [records(PRODUCER, start), records(IDLE, start), [(0, 0)], [], records(CONSUMER, start - 50)]
    return parse(warps, kernel="up_forward", cta=7, tiles=3)


def test_spans_of_records_whose_clocks_wrap(picture: timeline.Timeline) -> None:
    assert picture.warps == {0: "producer", 4: "consumer 0"}
    assert picture.complete and picture.cycles == 50 + 3 * 2000
    consumers = [span for span in picture.spans if span.warp == 4]
    assert (consumers[0].what, consumers[0].begin, consumers[0].end, consumers[0].depth) == ("consumer", 0, 6000, 0)
    assert [(span.begin, span.cycles) for span in consumers if span.what == "mma"] == [
        (0, 1700),
        (2000, 1700),
        (4000, 1700),
    ]
    assert [span.cycles for span in consumers if span.what == "hand-over under mma"] == [200, 200]
    assert {(span.what, span.depth) for span in consumers} == {
        ("consumer", 0),
        ("mma", 1),
        ("wait full", 2),
        ("hand-over under mma", 2),
        ("hand-over", 1),
    }
    assert [clock for warp, _, clock in picture.tile_begins if warp == 0] == [50, 2050, 4050]
    assert {span.tile for span in picture.spans} == {-1, 0, 1, 2}


def test_shares_of_time(picture: timeline.Timeline) -> None:
    shares = picture.summary()
    assert shares["producer"] == pytest.approx({"wait empty": 0.75, "copy": 0.2, "TMA": 0.05})
    of_consumer = {"mma": 4400, "hand-over": 900, "wait full": 300, "hand-over under mma": 400}
    assert shares["consumer 0"] == pytest.approx({what: cycles / 6000 for what, cycles in of_consumer.items()})
    assert list(shares["consumer 0"]) == ["mma", "hand-over", "hand-over under mma", "wait full"]


def test_what_the_record_breaks_off_in() -> None:
    """A full memory ends within a span; so does a cut at a tile, which is no loss."""
    cut = parse([records(CONSUMER)[:5]])  # within the first tile's mma
    assert not cut.complete
    assert [(span.what, span.end, span.finished) for span in cut.spans] == [
        ("consumer", 100, False),
        ("mma", 100, False),
        ("wait full", 100, True),
    ]
    assert "full before" in repr(cut)
    limited = parse([records(CONSUMER)], tiles=1)
    assert limited.complete and not limited.spans[0].finished and limited.cycles == 2000


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ([[(0, 0)]], "got none"),
        ([[(5, 0x1FF)]], "expected a kind of timeline.cuh, got 0x1ff of warp 0"),
        ([[(5, 0x10A), (9, 0x206)]], r"warp 0 ends 'wait full' within \['mma'\]"),
        ([[(5, 0x20A)]], r"warp 0 ends 'mma' within \[\]"),
    ],
)
def test_what_is_no_record_is_refused(marks: list[list[Record]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(marks)


def test_the_drawing(picture: timeline.Timeline, tmp_path: Path) -> None:
    """It is XML without a script, and as much is drawn of a colour as there are spans."""
    root = ElementTree.fromstring(picture.svg())
    assert not [element for element in root.iter() if element.tag.endswith("}script")]
    groups = {group.get("id"): group for group in root.iter("{http://www.w3.org/2000/svg}g")}
    drawn = [
        element.get("style", "") for element in groups["warp 4, depth 1"].iter() if "fill" in element.get("style", "")
    ]
    assert len(drawn) == sum(span.warp == 4 and span.depth == 1 for span in picture.spans)
    assert sum(LOOKS["mma"][1] in style for style in drawn) == 3
    words = "".join(root.itertext())
    assert "tile 2" in words and "consumer 0, warp 4" in words and LOOKS["mma"][2] in words
    assert picture.svg() == picture.save(tmp_path / "a.svg").read_text()
    assert picture._repr_html_().count("<script>") == 1 and picture.svg() in picture._repr_html_()


def test_titles_tell_warp_times_and_source(picture: timeline.Timeline) -> None:
    """One of each span, in the order in which they are drawn; a nested one has its own."""
    lines = {
        ("consumer", "mma"): "mainloop.cuh:175  multiply();\nwgmma.mma_async",
        ("consumer", "consumer"): "kernel.cuh:247",
    }
    root = ElementTree.fromstring(replace(picture, sources=lines).svg())
    space = "{http://www.w3.org/2000/svg}"
    groups = {group.get("id"): group for group in root.iter(f"{space}g")}
    titles = [path.findtext(f"{space}title") for path in groups["warp 4, depth 1"].iter(f"{space}path")]
    assert titles[0] == "consumer 0, warp 4: mma\n1700 cycles, 0 to 1700, tile 0\n" + lines["consumer", "mma"]
    assert [title.split(": ")[1].split("\n")[0] for title in titles if title] == [*("mma", "hand-over") * 3]
    assert groups["warp 4, depth 0"].findtext(f".//{space}title", "").endswith("0 to 6000\nkernel.cuh:247")
    assert all(len(titles) == len([*groups[name].iter(f"{space}title")]) for name, titles in picture.titles.items())


def test_a_browser_shows_titles_zooms_and_moves(picture: timeline.Timeline, tmp_path: Path) -> None:
    programs = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("needs a Chromium")
    page_file = tmp_path / "page.html"
    page_file.write_text(f"<!doctype html><meta charset=utf-8><p>Above</p>{picture._repr_html_()}")
    with programs.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page, errors = opened.new_page(viewport={"width": 1200, "height": 900}), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(page_file.as_uri())

        def view() -> list[float]:
            return [float(word) for word in page.locator("svg").get_attribute("viewBox").split()]

        whole = view()
        page.locator('[id="warp 4, depth 1"] path').first.hover(position={"x": 3, "y": 1})
        assert page.inner_text("pre").startswith("consumer 0, warp 4: mma\n1700 cycles")
        page.mouse.wheel(0, -300)
        page.wait_for_function("whole => document.querySelector('svg').viewBox.baseVal.width < whole", arg=whole[2])
        zoomed = view()
        assert zoomed[2] / whole[2] == pytest.approx(zoomed[3] / whole[3])
        page.mouse.move(400, 200)
        page.mouse.down()
        page.mouse.move(360, 200)
        page.mouse.up()
        assert view()[0] > zoomed[0] and view()[2] == pytest.approx(zoomed[2])
        page.mouse.dblclick(400, 200)
        assert view() == whole and not errors
        opened.close()


@pytest.mark.parametrize(
    ("call", "argument", "error"),
    [
        (lambda: record(3), "launch", TypeError),  # type: ignore[arg-type]
        (lambda: record(list, tiles=0), "tiles", ValueError),
        (lambda: record(list, cta=-1), "cta", ValueError),
        (lambda: parse([]), "records", ValueError),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], argument: str, error: type[Exception]) -> None:
    refuses(call, argument, error)


def test_the_macro_is_compiled_in_for_as_long_as_it_is_asked_for() -> None:
    with compiled_in():
        assert product.DEBUG[-1] == "TIMELINE"
    assert "TIMELINE" not in product.DEBUG


# --- The device code -------------------------------------------------------------------------------------------------------


def test_host_and_device_have_the_same_numbers() -> None:
    header = (CUDA_SOURCES / "timeline.cuh").read_text()
    assert f"WARPS = {WARPS}, RECORDS = {RECORDS}, RECORD_BYTES = {timeline.RECORD_BYTES};" in header
    (edges,) = re.findall(r"enum Edge : uint32_t \{ (.*) \};", header)
    assert edges == ", ".join(f"{name.upper()} = {number:#x}00" for number, name in timeline.EDGES.items())
    (body,) = re.findall(r"enum What : uint32_t \{(.*?)\};", header, re.DOTALL)
    names = re.findall(r"^ *(\w+)", body, re.MULTILINE)
    assert [name.replace("_", " ").lower() for name in names] == [what.replace("-", " ").lower() for what in WHATS[1:]]


@pytest.mark.parametrize(
    "name",
    [
        "up_forward",
        "up_backward_weight",
        pytest.param("down_forward", marks=pytest.mark.full),
        pytest.param("down_backward_act", marks=pytest.mark.full),
    ],
)
def test_clocks_are_read_with_the_macro_alone(nvdisasm: None, name: str) -> None:
    """One kernel of each file: no clock without it, and with it clocks, the variables, no more registers, and at most two of a
    thread spilled: the consumers of weight gradients have none left."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")
    before, after = gemm.kernel_for(name), gemm.kernel_for(name, debug=(timeline.MACRO,))
    compile_many([before, after], jobs=1)
    assert not re.search(r"SR_CLOCK|SR_GLOBALTIMER", before.sass, re.IGNORECASE) and "timeline_" not in before.ptx
    assert after.sass.count("SR_CLOCKLO") >= 20
    assert before.spills == 0 and after.spills <= 8 and after.registers == before.registers
    assert after.smem_bytes == before.smem_bytes
    assert after.sass.count("HGMMA") == before.sass.count("HGMMA")
    assert "timeline_records" in after.ptx and "timeline_cta" in after.ptx
    found = marked(after.ptx, after.entry)
    assert {("producer", "producer"), ("consumer", "consumer")} <= {*found} and not marked(before.ptx, before.entry)
    assert "wgmma.mma_async" in found["consumer", "mma"] and "mainloop.cuh:" in found["consumer", "mma"]
    for role, barrier in (("consumer", "full_barrier"), ("producer", "empty_barrier")):
        line, instruction = found[role, "wait full" if role == "consumer" else "wait empty"].splitlines()
        assert f"mbarrier_wait({barrier}()" in line and instruction.startswith("mbarrier.try_wait")
    assert not any("MARK(" in lines for lines in found.values())
