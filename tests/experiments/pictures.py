"""What the pictures share: a colour for each algorithm, lines with bands, rows of dots.

A line or a bar is the mean of the runs, a band their middle 80 %, a dot one run. A variant of an
algorithm has its colour, with another dash or hollow dots.
"""

import numpy as np

COLORS = {
    "REINFORCE": "#444444",
    "actor-critic": "#B8860B",
    "TRPO": "#009E73",
    "PPO": "#0072B2",
    "RLOO": "#8A63D2",
    "GRPO": "#D55E00",
    "DAPO": "#8C564B",
    "GSPO": "#CC5C9B",
    "CISPO": "#2A9FD6",
}
SOLID, DASHED, DOTTED = "-", (0, (5, 2)), (0, (1, 1.5))
WORDS = 9  # points: the size of words inside a picture

STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "lines.linewidth": 2.2,
}


def figure(title, height, *shape, **options):
    """A figure 5.6 inches wide, whose title states the finding, and its axes in a list."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(STYLE)
    page = Figure(figsize=(5.6, height), dpi=300, layout="constrained")
    page.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return page, page.subplots(*shape, squeeze=False, **options).flatten()


def curves(axes, x, lines, band=True):
    """Lines with bands. lines: {label: (values (runs, points), algorithm, dash)}."""
    axes.ends = []  # for label_lines
    for label, (runs, algorithm, dash) in lines.items():
        y, color = runs.mean(0), COLORS[algorithm]
        if band:
            low, high = np.percentile(runs, [10, 90], axis=0)
            axes.fill_between(x, low, high, color=color, alpha=0.13, linewidth=0)
        axes.plot(x, y, color=color, linestyle=dash)
        axes.ends.append((y[-1], label, color))


def label_lines(page):
    """When all lines are drawn: write each label where its line ends, with no overlap."""
    for axes in page.axes:
        rows = axes.get_subplotspec().get_gridspec().nrows
        a_line = WORDS * 1.8 * rows / (72 * page.get_figheight())  # of words, as a share
        ends = sorted(getattr(axes, "ends", []), key=lambda end: end[0])
        axes.get_ylim()  # brings the limits up to date
        sizes = [a_line * (1 + label.count("\n")) for _, label, _ in ends]
        bottoms, least, most = [], -1.0, 1.05
        for (y, _, _), size in zip(ends, sizes, strict=True):
            height = (axes.transScale + axes.transLimits).transform((1, y))[1]
            bottoms.append(max(height - size / 2, least))
            least = bottoms[-1] + size
        for i in reversed(range(len(ends))):
            most = min(bottoms[i], most - sizes[i])
            place = {"xy": (1.02, most + sizes[i] / 2), "xycoords": "axes fraction", "va": "center"}
            axes.annotate(ends[i][1], **place, color=ends[i][2], fontsize=WORDS)


def dots(axes, rows, center=np.mean):
    """A row of dots for each arm, and a bar at their center. rows: {label: (values (runs,),
    algorithm, whether the dots are filled)}."""
    for row, (runs, algorithm, filled) in enumerate(rows.values()):
        height = row + np.random.default_rng(0).permutation(np.linspace(-0.25, 0.25, len(runs)))
        color = COLORS.get(algorithm, "gray")
        style = {"color": color, "mfc": color if filled else "none", "alpha": 0.6}
        axes.plot(runs, height, "o", ms=4 if len(runs) < 50 else 2.5, zorder=1, **style)
        axes.plot(center(runs), row, "|", color="black", ms=20, mew=2.5)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def plain(axis, ticks):
    """Ticks of a logarithmic axis as plain numbers."""
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)
