"""Draw clip.png: GRPO's objective for one token, by its ratio, and where it has a gradient.

    python tests/learn/clip.py [FILE]

The thick line is grpo_llm.py's own surrogate, and autograd says where it is flat. The numbers are
both products at r = 0.5 and r = 1.5, the smaller first.
"""

import io
import sys
from pathlib import Path

import torch
from PIL import Image

HERE = Path(__file__).parent
for folder in ("tests", "."):
    sys.path.insert(0, str(HERE.parents[1] / folder))
from pictures import COLORS, WORDS, figure  # noqa: E402

import grpo_llm  # noqa: E402

ARGS = grpo_llm.Args()
LOW, HIGH, END = 1 - ARGS.clip_low, 1 + ARGS.clip_high, 2.0
TITLES = {1.0: "A = 1: to be made more likely", -1.0: "A = −1: to be made less likely"}
LABELS = {  # where the names of both products stand
    1.0: {"clip(r) A": (0.03, 0.86), "r A": (1.53, 1.74)},
    -1.0: {"clip(r) A": (1.4, -1.16), "r A": (0.24, -0.2)},
}


def objective(ratios, advantage):
    """The objective of a token at these ratios, and its derivative by log π."""
    logprobs = ratios.log()[:, None].requires_grad_()
    ones = torch.ones_like(logprobs)
    values, _ = grpo_llm.surrogate(logprobs, 0 * ones, advantage * ones[:, 0], ones, ARGS)
    (slopes,) = torch.autograd.grad(values.sum(), logprobs)
    return values.detach()[:, 0], slopes[:, 0]


def words(ratio, advantage):
    """Both products at this ratio, and whether the smaller one has a gradient."""
    products = ratio * advantage, min(max(ratio, LOW), HIGH) * advantage
    value, slope = (x.item() for x in objective(torch.tensor([ratio]), advantage))
    assert abs(value - min(products)) < 1e-6
    if products[0] == products[1]:
        return "equal"
    smaller, larger = (f"{product:.1f}".replace("-", "−") for product in sorted(products))
    return f"{smaller} < {larger}\n" + ("gradient" if slope else "no gradient")


def draw():
    title = "The clip stops a token that has moved far the way A pushes;\n"
    title += "the min lets a token that has moved the other way come back"
    page, axes = figure(title, 3.4, 1, 2)
    thin = {"color": "gray", "linestyle": (0, (1, 1.5)), "linewidth": 1.6}
    for panel, advantage in zip(axes, TITLES, strict=True):
        top = max(0, END * advantage)
        panel.plot([0, END], [0, END * advantage], **thin)
        panel.plot([0, LOW], [LOW * advantage] * 2, **thin)
        panel.plot([HIGH, END], [HIGH * advantage] * 2, **thin)
        for start, end in ((1e-3, LOW), (LOW, HIGH), (HIGH, END)):
            ratios = torch.linspace(start + 1e-4, end - 1e-4, 50)
            values, slopes = objective(ratios, advantage)
            color = COLORS["GRPO"] if slopes.any() else "black"
            panel.plot(ratios, values, color=color)
            if not slopes.any():
                panel.axvspan(start, end, color="black", alpha=0.08, linewidth=0)
            middle = 1.0 if start == LOW else 0.5 if end == LOW else 1.5
            place = {"ha": "center", "va": "top", "fontsize": WORDS, "color": color}
            panel.text((start + end) / 2, top + 0.31, words(middle, advantage), **place)
        for label, place in LABELS[advantage].items():
            panel.text(*place, label, color="gray", fontsize=WORDS, ha="left", va="bottom")
        panel.set(title=TITLES[advantage], xlabel="ratio r of the token")
        panel.set(xlim=(0, END), ylim=(top - END - 0.1, top + 0.35))
        panel.set_xticks([0, 0.5, LOW, HIGH, 1.5, END], ["0", "0.5", "0.8", "1.2", "1.5", "2"])
    axes[0].set_ylabel("objective of the token")
    return page


if __name__ == "__main__":
    picture = io.BytesIO()
    draw().savefig(picture)
    to = sys.argv[1] if len(sys.argv) > 1 else HERE / "clip.png"
    Image.open(picture).quantize(64).save(to, "PNG", optimize=True)
