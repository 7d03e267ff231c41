"""What the pictures share: a colour for each algorithm, their style, rows of dots."""

import numpy as np

COLORS = {
    "RLOO": "#8A63D2",
    "GRPO": "#D55E00",
    "DAPO": "#8C564B",
    "GSPO": "#CC5C9B",
    "CISPO": "#2A9FD6",
}
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


def dots(axes, rows):
    """A row of dots for each method, a dot per run, and a bar at their mean. rows: {label: (values
    (runs,), algorithm, whether the dots are filled)}."""
    for row, (runs, algorithm, filled) in enumerate(rows.values()):
        height = row + np.random.default_rng(0).permutation(np.linspace(-0.25, 0.25, len(runs)))
        color = COLORS[algorithm]
        style = {"color": color, "mfc": color if filled else "none", "alpha": 0.6}
        axes.plot(runs, height, "o", ms=4, zorder=1, **style)
        axes.plot(np.mean(runs), row, "|", color="black", ms=20, mew=2.5)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
