"""What the pictures share: a colour for each algorithm, lines with bands, rows of dots.

A line or a bar is the mean of the runs, a band their middle 80 %, a dot one run. A variant of an
algorithm has its colour, and another dash or hollow dots.
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
    "none": "#888888",  # no algorithm's: a loop without a bound, or without a critic
}
SOLID, DASHED, DOTTED, MIXED = "-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2))
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
    page = Figure(figsize=(5.6, height), dpi=150, layout="constrained")
    page.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return page, page.subplots(*shape, squeeze=False, **options).flatten()


def curves(axes, x, lines):
    """Lines with bands, and where each ends its label. lines: {label: (values (runs, points),
    algorithm, dash)}. Set the scale of y before."""
    for runs, algorithm, dash in lines.values():
        low, high = np.percentile(runs, [10, 90], axis=0)
        axes.fill_between(x, low, high, color=COLORS[algorithm], alpha=0.13, linewidth=0)
        axes.plot(x, runs.mean(0), color=COLORS[algorithm], linestyle=dash)
    to_share = axes.transScale + axes.transLimits  # of the height of the axes
    heights = to_share.transform([(x[-1], runs.mean(0)[-1]) for runs, _, _ in lines.values()])[:, 1]
    rows = axes.get_subplotspec().get_gridspec().nrows
    space = WORDS * 1.8 * rows / (72 * axes.figure.get_figheight())  # of one line of words
    least = -1.0
    for i in np.argsort(heights):
        label = list(lines)[i]
        height = least = max(heights[i], least + space)
        least += space * label.count("\n")
        style = {"color": COLORS[lines[label][1]], "fontsize": WORDS, "va": "center"}
        y = to_share.inverted().transform((1, height))[1]
        axes.annotate(label, (1.02, y), xycoords=("axes fraction", "data"), **style)


def dots(axes, rows, center=np.mean):
    """A row of dots for each arm, and a bar at their center. rows: {label: (values (runs,),
    algorithm, whether the dots are filled)}."""
    for row, (runs, algorithm, filled) in enumerate(rows.values()):
        height = row + np.random.default_rng(0).permutation(np.linspace(-0.25, 0.25, len(runs)))
        color = COLORS[algorithm]
        style = {"color": color, "mfc": color if filled else "none", "alpha": 0.6}
        axes.plot(runs, height, "o", ms=4 if len(runs) < 50 else 2.5, zorder=1, **style)
        axes.plot(center(runs), row, "|", color="black", ms=20, mew=2.5)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def plain(axis, ticks, form="{:g}"):
    """Ticks of a logarithmic axis as plain numbers."""
    axis.set_ticks(ticks, [form.format(tick) for tick in ticks])
    axis.set_ticks([], minor=True)
