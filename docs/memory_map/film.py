"""A program with a leak: the frames of a film are smoothed, and something keeps each of them."""

from collections import deque

import numpy as np

FRAMES, SHAPE = 24, (768, 1024)


def read(number):
    """A frame of the film: 3 MiB."""
    random = np.random.default_rng(number)
    return random.random(SHAPE, dtype="f4")


def blur(frame):
    """The mean of neighbours, in both directions."""
    for axis in (0, 1):
        frame = (frame + np.roll(frame, 1, axis) + np.roll(frame, -1, axis)) / 3
    return frame


def moved(window):
    """How much the last frames of the window differ from the first one."""
    return float(np.abs(window[-1] - window[0]).mean())


def main():
    """Every frame in turn; a window of four is kept on purpose."""
    window, previews, motion = deque(maxlen=4), [], []
    for number in range(FRAMES):
        frame = read(number)
        window.append(blur(frame))
        motion.append(moved(window))
        previews.append(frame[::8, ::8])  # a view, which keeps all of its frame
    return previews, motion


KEPT = main()
