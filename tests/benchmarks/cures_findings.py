"""What the experiments of cures.py found, in a few sentences each, as EXPERIMENTS.md shows them.

Every measured number is a field, {row / column} of the experiment's table in results/cures.md: the
median over the seeds, or with `/ low` or `/ high` an end of their range. A format may follow, as in
{psi return / variance :,.0f}. quotes.py writes the outcome into the pages.
"""

import re
from statistics import median

from bench import table

FINDINGS = {
    "psi": "At one and the same policy the gradient's variance is {psi return / variance :,.0f} "
    "with the whole return, {psi reward-to-go / variance :,.0f} with reward-to-go, "
    "{psi baseline / variance :,.0f} with the baseline. With the whole return the greedy return "
    "after 100,000 steps is {psi return / greedy_return :.0f} "
    "({psi return / greedy_return / low :.0f} to {psi return / greedy_return / high :.0f}) in the "
    "median; with the other two the worst seed "
    "ends at {psi reward-to-go / greedy_return / low :.0f} and "
    "{psi baseline / greedy_return / low :.0f}.",
    "step": "After 60,000 steps the actor-critic's worst seed ends at "
    "{script actor_critic, value 0.003 / greedy_return / low :.0f} with a learning rate of 0.003; "
    "with 0.01 it is lost ({script actor_critic, value 0.01 / greedy_return :.0f} in the median). "
    "TRPO's worst seed ends at "
    "{script trpo, value 0.001 / greedy_return / low :.0f} for δ 0.001 and at "
    "{script trpo, value 0.1 / greedy_return / low :.0f} for δ 0.1, which is ten times the "
    "step, as its length grows with √δ. PPO ends at {script ppo, value 0.03 / greedy_return :.0f} "
    "with a rate of 0.03.",
    "lambda": "At λ = 0 the advantages have a squared bias of {/ bias² λ=0.0 :.0f} and a variance "
    "of {/ variance λ=0.0 :.0f}, as CartPole's next state follows from the action; at λ = 1 these "
    "are {/ bias² λ=1.0 :.1f} and {/ variance λ=1.0 :.1f}. On CartPole PPO learns fastest at "
    "λ = 1: the critic's bias costs more than the variance.",
    "clip": "After 4, 10 and 20 passes over each rollout the worst seed ends at "
    "{form clip, epochs 4 / greedy_return / low :.0f}, "
    "{form clip, epochs 10 / greedy_return / low :.0f} and "
    "{form clip, epochs 20 / greedy_return / low :.0f} with the clip, at "
    "{form no clip, epochs 4 / greedy_return / low :.0f}, "
    "{form no clip, epochs 10 / greedy_return / low :.0f} and "
    "{form no clip, epochs 20 / greedy_return / low :.0f} without it, when one rollout moves the "
    "policy by up to {form no clip, epochs 10 / kl_max :.1f} nats in 10 passes instead of "
    "{form clip, epochs 10 / kl_max :.2f}. The penalty of adaptive weight ends at "
    "{form penalty, epochs 4 / greedy_return / low :.0f}, "
    "{form penalty, epochs 10 / greedy_return / low :.0f} and "
    "{form penalty, epochs 20 / greedy_return / low :.0f}.",
    "baseline": "With rewards of 0 and 1 it shows no gain: after 10 rollouts the gradient's "
    "variance over its squared mean is {after 10 / noise, none :.2f} without and "
    "{after 10 / noise, leave-one-out :.2f} with it. But add 1 to every reward, which tells "
    "nothing new, and pass@1 without a baseline falls from {baseline none / pass@1 :.2f} to "
    "{baseline none, R + 1 / pass@1 :.2f}.",
    "passes": "After 40 rollouts with 16 passes over each, the median (worst) pass@1 is "
    "{method GRPO, passes 16 / pass@1 :.2f} ({method GRPO, passes 16 / pass@1 / low :.2f}) with "
    "GRPO, "
    "{method DAPO, passes 16 / pass@1 :.2f} ({method DAPO, passes 16 / pass@1 / low :.2f}) with "
    "DAPO and "
    "{method GSPO, passes 16 / pass@1 :.2f} ({method GSPO, passes 16 / pass@1 / low :.2f}) with "
    "GSPO, but "
    "{method CISPO, passes 16 / pass@1 :.2f} ({method CISPO, passes 16 / pass@1 / low :.2f}) with "
    "CISPO, whose clip stops no token, "
    "{method GRPO, no clip, passes 16 / pass@1 :.2f} "
    "({method GRPO, no clip, passes 16 / pass@1 / low :.2f}) without GRPO's clip, and "
    "{method RLOO, passes 16 / pass@1 :.2f} ({method RLOO, passes 16 / pass@1 / low :.2f}) with "
    "RLOO. The clip does it, more than the ratio: RLOO's gradient in GRPO's place ends at "
    "{method RLOO in GRPO, passes 16 / pass@1 :.2f} "
    "({method RLOO in GRPO, passes 16 / pass@1 / low :.2f}), and at "
    "{method GRPO, no ratio, passes 16 / pass@1 :.2f} "
    "({method GRPO, no ratio, passes 16 / pass@1 / low :.2f}) where it stops at GRPO's clip. A "
    "rollout then moves a token by {method GRPO, no ratio, passes 16 / KL of a rollout :.2f} nats "
    "instead of {method RLOO in GRPO, passes 16 / KL of a rollout :.1f}. Passes buy rollouts, not "
    "a better end: GRPO is half right after "
    "{method GRPO, passes 16 / rollouts to 0.5 :.0f} instead of "
    "{method GRPO, passes 1 / rollouts to 0.5 :.0f}, but with one pass it ends at "
    "{method GRPO, passes 1 / pass@1 :.2f} ({method GRPO, passes 1 / pass@1 / low :.2f}). At "
    "three times the rate 8 passes are too many for all: "
    "{method GSPO, passes 8, learning_rate 0.0012 / pass@1 :.2f} "
    "({method GSPO, passes 8, learning_rate 0.0012 / pass@1 / low :.2f}) with GSPO, "
    "{method GRPO, passes 8, learning_rate 0.0012 / pass@1 :.2f} "
    "({method GRPO, passes 8, learning_rate 0.0012 / pass@1 / low :.2f}) with GRPO, "
    "{method CISPO, passes 8, learning_rate 0.0012 / pass@1 :.2f} "
    "({method CISPO, passes 8, learning_rate 0.0012 / pass@1 / low :.2f}) with CISPO, the best of "
    "the other scripts.",
    "steps": "With eight steps on each rollout at a rate of 0.0005 RLOO ends at "
    "{method RLOO, learning_rate 0.0005 / pass@1 :.2f}, GRPO with its clip and without at "
    "{method GRPO, learning_rate 0.0005 / pass@1 :.2f} and "
    "{method GRPO, no clip, learning_rate 0.0005 / pass@1 :.2f}; RLOO with one step reaches "
    "{method RLOO, 1 step, learning_rate 0.001 / pass@1 :.2f} at 0.001. But at 0.002 "
    "RLOO ends at "
    "{method RLOO, learning_rate 0.002 / pass@1 :.2f}, GRPO without its clip at "
    "{method GRPO, no clip, learning_rate 0.002 / pass@1 :.2f} and with it at "
    "{method GRPO, learning_rate 0.002 / pass@1 :.2f}. The last two overlap: little of the gain "
    "is the clip's. DAPO ends at {method DAPO, learning_rate 0.002 / pass@1 :.2f}, GSPO at "
    "{method GSPO, learning_rate 0.002 / pass@1 :.2f}, CISPO at "
    "{method CISPO, learning_rate 0.002 / pass@1 :.2f}.",
    "kl": "Both lie on one curve of pass@1 against KL, but the same β means another thing: "
    "0.3 leaves {method in the reward, beta 0.3 / KL of an answer :.1f} nats and a pass@1 of "
    "{method in the reward, beta 0.3 / pass@1 :.2f} in the reward, "
    "{method in the loss, beta 0.3 / KL of an answer :.1f} and "
    "{method in the loss, beta 0.3 / pass@1 :.2f} in the loss. At β 1 it is the reward that holds "
    "closer, with {method in the reward, beta 1.0 / KL of an answer :.2f} nats and "
    "{method in the loss, beta 1.0 / KL of an answer :.2f}.",
    "critic": "To be 90 % right takes PPO with a critic {method PPO 1 / rollouts to 0.9 :.0f} "
    "rollouts (at last it explains {method PPO 1 / explained :.0%} of the rewards' variance), "
    "GRPO {method GRPO / rollouts to 0.9 :.0f}, and PPO with the batch mean instead of a "
    "critic {method PPO 1, no critic / rollouts to 0.9 :.0f}: neither critic nor group matters on "
    "answers this short. The critic doubles the training state, from "
    "{method GRPO / megabytes :.1f} to {method PPO 1 / megabytes :.1f} MB.",
    "length": "GRPO gives a token of a long answer less weight, Dr. GRPO does not. But on this run "
    "wrong answers hardly grow: from {method GRPO / wrong at the start :.1f} tokens "
    "to {method GRPO / wrong, second half :.1f} "
    "({method GRPO / wrong, second half / low :.1f} to "
    "{method GRPO / wrong, second half / high :.1f}); Dr. GRPO's go to "
    "{method Dr. GRPO / wrong, second half :.1f}.",
    "difficulty": "After 8 rollouts a group with 1 or 7 right answers of 8 has "
    "{after 8, std True / norm at 1 or 7 of 8 / at 3 to 5 :.2f} times the gradient of one with 3 "
    "to 5, and {after 8, std False / norm at 1 or 7 of 8 / at 3 to 5 :.2f} times without the "
    "division by std. So std raises the weight of nearly hopeless and nearly solved questions, "
    "but not above that of the others.",
    "cliphigher": "With 16 passes over a rollout the clip acts on "
    "{clip_high 0.2, passes 16, steps 16 / clipped :.1%} of the tokens. Working it out, rare at "
    "the start, is the style of {clip_high 0.2, passes 16, steps 16 / rare style after 5 :.2f} "
    "({clip_high 0.2, passes 16, steps 16 / rare style after 5 / low :.2f} to "
    "{clip_high 0.2, passes 16, steps 16 / rare style after 5 / high :.2f}) of the answers after 5 "
    "rollouts with an ε_high of 0.2, of "
    "{clip_high 0.28, passes 16, steps 16 / rare style after 5 :.2f} "
    "({clip_high 0.28, passes 16, steps 16 / rare style after 5 / low :.2f} to "
    "{clip_high 0.28, passes 16, steps 16 / rare style after 5 / high :.2f}) with 0.28 and of "
    "{clip_high 0.5, passes 16, steps 16 / rare style after 5 :.2f} "
    "({clip_high 0.5, passes 16, steps 16 / rare style after 5 / low :.2f} to "
    "{clip_high 0.5, passes 16, steps 16 / rare style after 5 / high :.2f}) with 0.5. But it keeps "
    "no more entropy, {clip_high 0.28, passes 16, steps 16 / entropy at the end :.3f} nats at the "
    "end with 0.28 and {clip_high 0.2, passes 16, steps 16 / entropy at the end :.3f} with 0.2, "
    "nor a better pass@8, {clip_high 0.28, passes 16, steps 16 / pass@8 :.2f} "
    "({clip_high 0.28, passes 16, steps 16 / pass@8 / low :.2f}) and "
    "{clip_high 0.2, passes 16, steps 16 / pass@8 :.2f} "
    "({clip_high 0.2, passes 16, steps 16 / pass@8 / low :.2f}).",
    "dynamic": "Groups with a signal fall from {method DAPO / signal at first :.0%} of those drawn "
    "to {method DAPO / signal at last :.0%}. With draws until a step is full, pass@1 ends at "
    "{method DAPO / pass@1 :.3f}, with a single draw at {method DAPO, one draw / pass@1 :.3f}. "
    "It costs {method DAPO / completions :,.0f} completions instead of "
    "{method DAPO, one draw / completions :,.0f}: progress per update, paid in samples.",
    "overlong": "Under a limit of 12 tokens {cut_off penalty, limit 12 / cut off at the end :.1%} "
    "of the answers are cut off at the end with the penalty, "
    "{cut_off read, limit 12 / cut off at the end :.1%} without. But pass@1 is "
    "{cut_off penalty, limit 12 / pass@1 :.2f} with it and "
    "{cut_off read, limit 12 / pass@1 :.2f} without: the price is right "
    "answers.",
    "ratio": "After 16 passes over a rollout the log-ratio has a spread of "
    "{passes 16 / token :.2f} at a token, {passes 16 / sum :.1f} over a whole answer and "
    "{passes 16 / mean :.2f} in an answer's mean. With the advantage, along which the policy is "
    "pushed, a token's correlates by {passes 16 / token with A :.2f} "
    "({passes 16 / token with A / low :.2f} to {passes 16 / token with A / high :.2f}), the mean "
    "by {passes 16 / mean with A :.2f} ({passes 16 / mean with A / low :.2f} to "
    "{passes 16 / mean with A / high :.2f}); two tokens of an answer by "
    "{passes 16 / correlation of tokens :.2f}. But GSPO's bounds are narrower by more than that: "
    "{passes 16 / mean beyond GSPO's bounds :.0%} of the answers are beyond them, "
    "{passes 16 / token beyond GRPO's bounds :.0%} of the tokens beyond GRPO's.",
    "silenced": "With 8 passes over a rollout GRPO's clip silences "
    "{method GRPO, guess_rate 0.999, passes 8 / silenced of praised :.1%} of the tokens of answers "
    "with A > 0, the unlikely ones: their probability was "
    "{method GRPO, guess_rate 0.999, passes 8 / median old probability, silenced :.2f} in the "
    "median, that of all "
    "{method GRPO, guess_rate 0.999, passes 8 / median old probability, praised :.2f}. From a "
    "model that guesses 99.9 % of the time CISPO is half right after "
    "{method CISPO, guess_rate 0.999, passes 8 / rollouts to 0.5, or 1 more than all "
    ":.0f} (best {method CISPO, guess_rate 0.999, passes 8 / "
    "rollouts to 0.5, or 1 more than all / low :.0f}) rollouts in the median, GRPO after "
    "{method GRPO, guess_rate 0.999, passes 8 / rollouts to 0.5, or 1 more than all "
    ":.0f} (best {method GRPO, guess_rate 0.999, passes 8 / "
    "rollouts to 0.5, or 1 more than all / low :.0f}), and CISPO with GRPO's clip "
    "in place of its own after "
    "{method CISPO, GRPO's clip, guess_rate 0.999, passes 8 / rollouts to 0.5, or 1 more than all "
    ":.0f} (best {method CISPO, GRPO's clip, guess_rate 0.999, passes 8 / "
    "rollouts to 0.5, or 1 more than all / low :.0f}). But the worst "
    "seed of each gets there in none of the 40, and without its clip GRPO is no faster, "
    "{method GRPO, no clip, guess_rate 0.999, passes 8 / rollouts to 0.5, or 1 more than all "
    ":.0f} (best {method GRPO, no clip, guess_rate 0.999, passes 8 / "
    "rollouts to 0.5, or 1 more than all / low :.0f}).",
}

SHOWN, PARTLY, NOT_SHOWN = "shown", "partly", "not at this size"
VERDICTS = {  # whether the claim was seen to hold
    "psi": SHOWN,
    "step": SHOWN,
    "lambda": PARTLY,
    "clip": SHOWN,
    "baseline": PARTLY,
    "critic": SHOWN,
    "passes": SHOWN,
    "steps": PARTLY,
    "kl": PARTLY,
    "length": NOT_SHOWN,
    "difficulty": PARTLY,
    "cliphigher": PARTLY,
    "dynamic": SHOWN,
    "overlong": PARTLY,
    "ratio": SHOWN,
    "silenced": PARTLY,
}


def summary(found: dict) -> dict:
    """{row: {column: (lowest, median, highest)}} over the seeds; a row for each setting."""
    runs = {}
    for settings, result in found["runs"]:
        row = ", ".join(f"{name} {value}" for name, value in settings.items() if name != "seed")
        runs.setdefault(row, []).append(result)
    rows = {}
    for row, results in runs.items():
        rows[row] = {"seeds": len(results)}
        for column in dict.fromkeys(name for result in results for name in result):
            values = [result[column] for result in results if result.get(column) is not None]
            if values and not isinstance(values[0], list):
                rows[row][column] = (min(values), median(values), max(values))
    return rows


def lines(found: dict) -> list[str]:
    """Markdown: a row per setting, the median over seeds of each number, and its range."""
    rows = summary(found)
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))[1:]

    def cell(numbers, column):
        low, middle, high = numbers[column]
        return f"{middle:.4g} ({low:.4g} to {high:.4g})"

    cells = [
        [row, numbers["seeds"], *(cell(numbers, c) if c in numbers else "–" for c in columns)]
        for row, numbers in rows.items()
    ]
    return table(["", "seeds", *columns], cells)


def fill(finding: str, rows: dict) -> str:
    """The sentences with their numbers; rows as in summary()."""

    def number(field):
        place, form = field.groups()
        end = 1
        for position, word in ((0, " / low"), (2, " / high")):
            if place.endswith(word):
                place, end = place.removesuffix(word), position
        row, _, column = place.partition("/")  # a row's name holds no slash, a column's may
        return format(rows[row.strip()][column.strip()][end], form).replace("%", " %")

    return re.sub(r"\{(.*?) :(.*?)\}", number, finding)
