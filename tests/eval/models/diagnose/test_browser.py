"""The page in a real browser, on a phone and on a desk, by day and by night."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from pasa.eval.models.diagnose import report, run

OPTIONS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
OPTIONS += "disable-component-update disable-sync disable-dev-shm-usage"
SIZES = {"phone": (390, 844), "desk": (1280, 800)}
READABLE = 4.5
"""Contrast of text of normal size: WCAG 2.2, 1.4.3 (AA)."""

CONTRASTS = Path(__file__).with_name("contrasts.js").read_text(encoding="utf-8")


def program(*names):
    """Path of a program. A machine without it fails: what is not looked at is not known to work."""
    path = next(filter(None, map(shutil.which, names)), None)
    return path or pytest.fail(f"none of {names} is installed; Debian: apt-get install chromium chromium-driver")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium", "chromium-browser", "google-chrome")
    for option in (*OPTIONS.split(), f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(program("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory, text_diagnosis, video_diagnosis):
    folder = tmp_path_factory.mktemp("pages")
    for name, (result, maps) in {"text": text_diagnosis, "video": video_diagnosis}.items():
        (folder / f"{name}.html").write_text(run.render_page(result, maps), encoding="utf-8")
    return folder


def look(driver, path, screen, scheme="light"):
    """Open a page; what it asked for, and what the console said of it."""
    width, height = SIZES[screen]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": screen == "phone"}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for log in ("browser", "performance"):
        driver.get_log(log)  # what came before
    address = path.as_uri()
    driver.get(address)
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert address in asked, "the log sees requests"
    outside = [url for url in asked if url != address and not url.startswith("data:")]
    return outside, driver.get_log("browser")


def too_wide(driver):
    return driver.execute_script("return document.documentElement.scrollWidth > document.documentElement.clientWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SIZES)
@pytest.mark.parametrize("name", ["text", "video"])
def test_the_page_in_a_browser(browser, pages, name, screen, scheme):
    outside, complaints = look(browser, pages / f"{name}.html", screen, scheme)
    assert complaints == []
    assert outside == []
    assert not too_wide(browser)
    widths = browser.execute_script("return [...document.images].map((image) => image.naturalWidth)")
    assert min(widths) > 0
    assert browser.execute_script("return document.scripts.length") == 0
    contrasts = browser.execute_script(CONTRASTS)
    assert len(contrasts) > 100
    assert min(contrasts)[0] >= READABLE, min(contrasts)
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_map_and_the_table_scroll_in_boxes_of_their_own(browser, pages):
    """The boxes scroll by touch, and by keyboard, because they can have the focus."""
    look(browser, pages / "video.html", "phone")
    for index in range(2):
        box = f"document.querySelectorAll('.scroll')[{index}]"
        assert browser.execute_script(f"return {box}.scrollWidth > {box}.clientWidth")
        assert browser.execute_script(f"{box}.focus(); return document.activeElement === {box}")
        label = f"{box}.getAttribute('aria-labelledby')"
        assert browser.execute_script(f"return document.getElementById({label}).innerText")


@pytest.mark.parametrize("name", ["text", "video"])
def test_the_table_of_heads_is_whole_on_a_desk_and_details_are_folded_away(browser, pages, name):
    """Story: at 1280 pixels the last column was cut, because ranges of keys and phases stood in the table."""
    look(browser, pages / f"{name}.html", "desk")
    box = "document.querySelectorAll('.scroll')[1]"
    assert browser.execute_script(f"return {box}.scrollWidth <= {box}.clientWidth")
    header = browser.execute_script(f"return [...{box}.querySelectorAll('thead th')].map((cell) => cell.innerText)")
    assert header == ["layer, head", *report.PAGE[2:]]
    assert not browser.execute_script("return document.querySelectorAll('details[open]').length")
    assert set(report.PAGE) | set(report.FOLDED) == set(report.COLUMNS)


def test_a_page_that_fails_is_noticed(browser, tmp_path):
    """Every measure of the first test, on a page made to fail it."""
    path = tmp_path / "bad.html"
    text = '<p style="width: 60rem; color: #888888">wide <span style="background: #123456; color: #654321">dark</span>'
    path.write_text(f'<!doctype html><meta name="viewport" content="width=device-width"><img src="gone.png">{text}')
    outside, complaints = look(browser, path, "phone")
    assert outside == [(tmp_path / "gone.png").as_uri()]
    assert len(complaints) == 1
    assert too_wide(browser)
    assert browser.execute_script("return document.images[0].naturalWidth") == 0
    (grey, _), (dark, _) = browser.execute_script(CONTRASTS)
    assert grey == pytest.approx(3.54, abs=0.01), "#888888 on white"
    assert dark < 2
