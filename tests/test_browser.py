"""The report's page in a real browser: it draws, it answers, asks the network for nothing, and takes no text for HTML."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from gracecl.lab import cli
from gracecl.lab.report import find_runs
from gracecl.lab.report.beside_paper import Column
from gracecl.lab.report.command import command
from gracecl.lab.report.compare import compare
from gracecl.lab.report.groups import group_runs
from run_folders import write_run
from waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser")
Browser, Page, expect = sync_api.Browser, sync_api.Page, sync_api.expect

CHROMIUM = shutil.which("chromium")
SCREENSHOTS = Path(__file__).parents[1] / "runs" / "screenshots"
HOSTILE = "er(name='<img src=x onerror=window.hacked=1></script><b>bold</b>')"
METHODS = ("er()", "mose()", "grace(mose())")

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: make test-browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, three seeds each, and the report that the command makes of them."""
    folder = tmp_path_factory.mktemp("runs")
    for method in METHODS:
        for seed in range(3):
            write_run(folder, method, seed)
    assert cli.call(["report", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def beside_paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six seeds of the same methods on a data set and with memories that the paper has, and of one that it does not know."""
    folder = tmp_path_factory.mktemp("paper")
    for method, memory in (*((method, 1000) for method in METHODS), ("er()", 2000), ("sgd()", 1000)):
        for seed in range(6):
            write_run(folder, method, seed, stream="split-cifar100(tasks=3)", memory=memory)
    assert cli.call(["report", str(folder)]) == 0
    return folder


@pytest.fixture
def opened(browser: Browser, folder: Path) -> Iterator[Page]:
    with closely_watched(browser, folder / "report.html") as page:
        yield page


class closely_watched:
    """A page in a context of its own; when it is left, it has neither complained nor asked for anything but itself."""

    def __init__(self, browser: Browser, file: Path, width: int = 1280, theme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.file = file
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Page:
        page = self.context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(self.file.as_uri())
        return page

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.context.close()
        if kind is None:
            assert self.complaints == []
            assert self.requests == [self.file.as_uri()]


def rows(page: Page, table: str = "methods") -> list[list[str]]:
    found = page.locator(f"#{table} tbody tr").all()
    return [[" ".join(cell.split()) for cell in row.locator("td").all_inner_texts()] for row in found]


def screenshot(page: Page, name: str) -> Image.Image:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    data = page.screenshot(full_page=True)
    (SCREENSHOTS / f"{name}.png").write_bytes(data)
    return Image.open(BytesIO(data)).convert("RGB")


def test_everything_is_drawn(opened: Page) -> None:
    for figure in ("stream", "final", "trade", "tasks", "matrix", "layers"):
        assert opened.locator(f"#{figure} svg[aria-label]").count() == 1, figure
    assert len(rows(opened)) == len(METHODS)
    assert len(rows(opened, "runs")) == 3 * len(METHODS)
    picture = screenshot(opened, "report")
    assert picture.width == 1280
    assert len(picture.getcolors(maxcolors=1 << 24)) > 200, "the page is not blank"


@pytest.mark.parametrize("metric", ["acc", "bwt", "forgetting_mose"])
def test_the_numbers_are_those_of_the_report(opened: Page, folder: Path, metric: str) -> None:
    opened.select_option("#metric", metric)
    heading = opened.locator("#methods th.chosen").inner_text()
    assert heading.split()[0] == metric
    place = opened.locator("#methods th").all_inner_texts().index(heading)
    shown = {row[0]: row[place] for row in rows(opened)}
    for group in group_runs(find_runs(folder)):
        mean, std, half, _ = group.summarise(metric)
        text = f"{mean:.2f} ± {std:.2f} {mean - half:.2f} to {mean + half:.2f}".replace("-", "−")
        assert shown[group.label] == text


@pytest.mark.parametrize("metric", ["acc", "forgetting_mose"])
def test_the_paper_stands_beside_each_method_that_it_has(browser: Browser, beside_paper: Path, metric: str) -> None:
    with closely_watched(browser, beside_paper / "report.html") as page:
        page.select_option("#metric", metric)
        titles = page.locator("#methods th").all_inner_texts()
        at = titles.index("paper")
        assert titles[at - 1].split()[0] == metric
        assert titles[at + 1] == "Δ"
        groups = {group.label: group for group in group_runs(find_runs(beside_paper))}
        known = 0
        for row in rows(page):
            group = groups.pop(row[0])
            printed = Column("Split CIFAR-100", group.runs[0].config["memory"]).value(group.method, metric)
            if printed is None:
                assert row[at : at + 2] == ["–", "–"]
            else:
                known += 1
                difference = group.summarise(metric).mean - printed
                assert row[at : at + 2] == [f"{printed:.1f}", f"{difference:+.1f}".replace("-", "−")]
        assert (known, groups) == (4, {})
        expect(page.locator("#reading")).to_contain_text(
            "with a memory of 1,000; Split CIFAR-100 with a memory of 2,000, as printed"
        )
        page.locator("#methods").get_by_role("button", name="Δ").click()
        assert page.locator("#methods th[aria-sort=descending]").inner_text() == "Δ"
        screenshot(page, f"beside-paper-{metric}")
        page.select_option("#metric", "bwt")
        assert "paper" not in page.locator("#methods").inner_text()


def test_the_paper_is_left_out_on_demand(browser: Browser, beside_paper: Path, tmp_path: Path) -> None:
    assert cli.call(["report", str(beside_paper), "--paper", "none", "--out", str(tmp_path)]) == 0
    with closely_watched(browser, tmp_path / "report.html") as page:
        assert "paper" not in page.locator("main").inner_text()


@pytest.mark.parametrize("metric", ["acc", "forgetting_mose"])
@pytest.mark.parametrize("seeds", [6, 5, 4, 3])
def test_differences_are_those_of_gracecl_compare(browser: Browser, beside_paper: Path, metric: str, seeds: int) -> None:
    groups = group_runs([run for run in find_runs(beside_paper) if run.config["seed"] < seeds])
    with closely_watched(browser, beside_paper / "report.html") as page:
        for seed in range(seeds, 6):
            page.get_by_role("group", name="seeds").get_by_label(str(seed), exact=True).uncheck()
        page.select_option("#metric", metric)
        for control in (groups[0], groups[2]):
            page.select_option("#control", label=control.label)
            found = compare([("", group, control) for group in groups if group is not control], metric)
            shown = {row[0]: row for row in rows(page, "differences")}
            assert shown.keys() == {line.method for line in found}
            for line in found:
                mean, _, low, high, *_ = line.difference
                _, n, difference, interval, p, words = shown[line.method]
                assert (n, difference) == (str(seeds), f"{mean:+.2f}".replace("-", "−"))
                assert interval == f"{low:+.2f} to {high:+.2f}".replace("-", "−")
                assert p == ("< 0.001" if line.corrected < 0.001 else f"{line.corrected:.3f}")
                assert line.sentence.replace("`", "").startswith(words.removesuffix("."))


def test_two_seeds_say_nothing(browser: Browser, beside_paper: Path) -> None:
    with closely_watched(browser, beside_paper / "report.html", 390) as page:
        for seed in range(2, 6):
            page.get_by_role("group", name="seeds").get_by_label(str(seed), exact=True).uncheck()
        for row in rows(page, "differences"):
            assert row[3:5] == ["no interval", "–"]
            assert row[5].startswith("Nothing can be said about")
        assert page.evaluate("document.documentElement.scrollWidth") == 390, "nothing hangs over"
        screenshot(page, "differences-390")


def test_another_rule_gives_its_own_numbers(opened: Page, folder: Path) -> None:
    opened.select_option("#rule", "linear_2")
    found = {
        group.label: group.under("linear_2").summarise("acc").mean
        for group in group_runs(find_runs(folder))
        if group.label != "er()"
    }
    shown = {row[0]: row[2] for row in rows(opened)}
    assert shown["er()"] == "–", "it has one layer"
    for label, mean in found.items():
        assert shown[label].startswith(f"{mean:.2f} ")


def test_seeds_can_be_left_out(opened: Page) -> None:
    opened.get_by_role("group", name="seeds").get_by_label("1", exact=True).uncheck()
    assert {row[1] for row in rows(opened)} == {"2"}
    assert all("2 seeds: no interval" in row[2] for row in rows(opened))
    assert {row[1] for row in rows(opened, "runs")} == {"0", "2"}
    for seed in ("0", "2"):
        opened.get_by_role("group", name="seeds").get_by_label(seed, exact=True).uncheck()
    expect(opened.locator("#stream")).to_contain_text("No method is ticked")


def test_methods_can_be_left_out(opened: Page) -> None:
    assert opened.locator("#stream .legend li").count() == 3
    opened.locator("#methods").get_by_label("mose()", exact=True).uncheck()
    assert sorted(opened.locator("#stream .legend li").all_inner_texts()) == ["er()", "grace(mose())"]
    opened.get_by_role("button", name="none").click()
    expect(opened.locator("#final")).to_contain_text("No ticked method")
    opened.get_by_role("button", name="all", exact=True).click()
    assert opened.locator("#stream .legend li").count() == 3


def test_tables_sort(opened: Page) -> None:
    heading = opened.locator("#runs").get_by_role("button", name="acc ↑")
    heading.click()
    values = [float(row[2]) for row in rows(opened, "runs")]
    assert values == sorted(values, reverse=True)
    heading.click()
    assert [float(row[2]) for row in rows(opened, "runs")] == values[::-1]
    assert opened.locator("#runs th[aria-sort=ascending]").inner_text() == "acc ↑"


def test_hovering_tells_the_value(opened: Page) -> None:
    box = opened.locator("#stream svg[aria-label]").bounding_box()
    assert box is not None
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = opened.locator("#stream [aria-label=tip]")
    expect(tip).to_contain_text(re.compile(r"step \d+.* % ± .*\(3 seeds\)"))


def test_a_run_and_its_configuration_are_one_click_away(opened: Page, folder: Path) -> None:
    row = opened.locator("#runs tbody tr").filter(has_text="grace(mose())").nth(1)
    row.get_by_role("button", name="configuration").click()
    run = next(run for run in find_runs(folder) if run.config["method"] == "grace(mose())" and run.config["seed"] == 1)
    assert opened.locator("#command").inner_text() == command(run)
    expect(opened.locator("#config")).to_contain_text(run.config["stream_hash"])
    opened.get_by_role("button", name="close").click()
    row.get_by_role("button", name="look").click()
    assert opened.locator("#run option:checked").inner_text() == "grace(mose()), seed 1"
    opened.select_option("#row", "log/gamma")
    expect(opened.locator("#layers")).to_contain_text("entropy weight γ")


def test_the_keyboard_is_enough(opened: Page) -> None:
    reached = []
    for _ in range(40):
        opened.keyboard.press("Tab")
        reached.append(
            opened.evaluate("document.activeElement.id || document.activeElement.textContent || document.activeElement.value")
        )
        if reached[-1] == "aia ↑":
            break
    assert reached[:4] == ["Skip to the table", "theme", "metric", "rule"]
    opened.keyboard.press("Enter")
    assert opened.locator("#methods th[aria-sort]").inner_text() == "aia ↑"
    assert opened.evaluate("document.activeElement.textContent") == "aia ↑", "the heading keeps the focus"
    opened.locator("#methods").get_by_label("er()", exact=True).focus()
    opened.keyboard.press("Space")
    assert opened.locator("#stream .legend li").count() == 2
    opened.locator("#configuration").focus()
    opened.keyboard.press("Enter")
    expect(opened.locator("#details")).to_be_visible()
    opened.keyboard.press("Escape")
    expect(opened.locator("#details")).to_be_hidden()


def test_light_and_dark(browser: Browser, folder: Path) -> None:
    def ground(page: Page) -> int:
        return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]))

    with closely_watched(browser, folder / "report.html", theme="dark") as page:
        assert ground(page) < 150, "as the system asks for"
        screenshot(page, "report-dark")
        page.click("#theme")
        assert ground(page) > 600


@pytest.mark.parametrize("width", [340, 390])
def test_a_phone_shows_all_of_it(browser: Browser, folder: Path, width: int) -> None:
    with closely_watched(browser, folder / "report.html", width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == width, "nothing hangs over"
        for chart in page.locator("figure svg[aria-label]").all():
            box = chart.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
        screenshot(page, f"report-{width}")
        page.set_viewport_size({"width": 1280, "height": 900})
        # From outside the page: playwright's own wait evaluates text inside it, which the page's policy forbids.
        wait_until(lambda: page.evaluate("document.querySelector('#stream svg[aria-label]').clientWidth") > 900)


def test_names_are_text_and_nothing_else(browser: Browser, tmp_path: Path) -> None:
    for method in ("er()", HOSTILE):
        write_run(tmp_path / str(len(method)), "er()", 0)
        file = next((tmp_path / str(len(method))).rglob("config.json"))
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace('"er()"', f'"{method}"').replace("split-digits", "<u>classes</u>"), encoding="utf-8")
    assert cli.call(["report", str(tmp_path)]) == 0
    with closely_watched(browser, tmp_path / "report.html") as page:
        assert {row[0] for row in rows(page)} == {"er()", HOSTILE}
        assert HOSTILE in rows(page, "differences")[0][5]
        box = page.locator("#stream svg[aria-label]").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] - 30, box["y"] + box["height"] / 2)
        page.click("#configuration")
        expect(page.locator("#config")).to_contain_text("<u>classes</u>")
        assert page.locator("main img, main b, main u, dialog img, dialog b, dialog u, header u").count() == 0
        assert page.evaluate("window.hacked") is None


def test_runs_without_much_in_them(browser: Browser, tmp_path: Path) -> None:
    """A run that has only begun, beside one that is finished: no steps, no evaluation, no times."""
    write_run(tmp_path, "mose()", 0)
    begun = write_run(tmp_path, "er()", 0)
    (begun / "metrics.jsonl").write_text("", encoding="utf-8")
    for name in ("summary.json", "timing.json"):
        (begun / name).unlink()
    assert cli.call(["report", str(tmp_path)]) == 0
    with closely_watched(browser, tmp_path / "report.html") as page:
        assert [row[0] for row in rows(page)] == ["mose()", "er()"]
        assert rows(page, "differences") == [], "the one that has begun has no seed yet"
        page.select_option("#run", label="er(), seed 0 (unfinished)")
        expect(page.locator("#layers")).to_contain_text("Nothing was recorded")
