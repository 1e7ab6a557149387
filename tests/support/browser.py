"""A real browser for tests of pages: headless Chromium, driven by selenium.

Debian has both programs: `apt-get install chromium chromium-driver`. No page reaches a network:
every name but this machine's own address is unknown to the browser, and what a page asks for all
the same is in `messages` as an error.
"""

import io
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

PROGRAMS = [shutil.which("chromium") or shutil.which("chromium-browser"),
            shutil.which("chromedriver")]  # fmt: skip
SOON = 20  # seconds
ARTIFACTS = Path(__file__).parents[2] / ".artifacts"  # pictures for people; git ignores it

needs_browser = pytest.mark.skipif(not all(PROGRAMS), reason="no chromium and chromium-driver here")


@contextmanager
def browser(width=1280, height=1000):
    """A selenium driver; its window has that many pixels for the page."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = PROGRAMS[0]
    for argument in (
        "--headless=new", f"--window-size={width},{height}", "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--force-device-scale-factor=1",
        "--disable-dev-shm-usage", *["--no-sandbox"] * (os.getuid() == 0),
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, ChromeService(PROGRAMS[1]))
    try:
        inner = driver.execute_script("return innerHeight")  # there is a bar above it
        driver.set_window_size(width, 2 * height - inner)
        yield driver
    finally:
        driver.quit()


def messages(driver):
    """What the page wrote to the console since the last call: warnings and errors."""
    return [
        entry["message"]
        for entry in driver.get_log("browser")
        if entry["level"] in ("WARNING", "SEVERE")
    ]


def pixels(element):
    """An element, or the driver's window, as an array of rows of RGB."""
    from PIL import Image

    shot = getattr(element, "screenshot_as_png", None) or element.get_screenshot_as_png()
    return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB"))


def keep(driver, name):
    """A picture of the window among the artifacts of this run."""
    ARTIFACTS.mkdir(exist_ok=True)
    driver.save_screenshot(str(ARTIFACTS / f"{name}.png"))


def until(probe, what):
    """The first true value of a probe."""
    end = time.monotonic() + SOON
    while not (found := probe()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found
