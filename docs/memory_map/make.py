"""The example of docs/traces.md: a trace of film.py, its page, and a picture of that.

    python docs/memory_map/make.py        makes docs/_static/memory_map.png anew

The picture needs what tests of pages need, too: the extra ``pages``, chromium and chromium-driver.
The page is made whenever the documentation is built (conf.py).
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from arenapy.trace import load
from arenapy.trace.page import page
from arenapy.trace.view import View

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "film.py"
PICTURE = HERE.parent / "_static" / "memory_map.png"
TITLE = "Memory over time: film.py"
MOST_BYTES = 150_000
WIDTH = 1060

#: What of the page is in the picture: from its title to the map, without sentences.
EXTENT = """
const top = document.querySelector("h1").getBoundingClientRect().top;
for (const one of document.querySelectorAll(".hint, #summary")) one.remove();
return [top, document.getElementById("charts").getBoundingClientRect().bottom];
"""


def make_page():
    """Run the program, recorded with its sites; the page as HTML."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "film.trace"
        run = ["-m", "arenapy", "run", "--quiet", "--trace", trace, "--sites"]
        subprocess.run([sys.executable, *run, PROGRAM], check=True)
        return page(View(load(trace)), TITLE)


def take_picture(html):
    """What a browser shows of the page, in few colours."""
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from browser import browser, pixels
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder, browser(WIDTH, 1400) as driver:
        path = Path(folder) / "film.html"
        path.write_text(html, encoding="utf-8")
        driver.get(path.as_uri())
        time.sleep(3)
        top, bottom = driver.execute_script(EXTENT)
        time.sleep(1)
        top, bottom = max(0, round(top) - 12), round(bottom)
        image = Image.fromarray(pixels(driver)[top:bottom])
    image.quantize(128).save(PICTURE, optimize=True)


def main():
    """Make the picture; the exit status."""
    take_picture(make_page())
    size = PICTURE.stat().st_size
    print(f"{PICTURE}: {size} bytes")
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
