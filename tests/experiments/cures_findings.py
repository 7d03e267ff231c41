"""What the experiments of cures.py found, in a few sentences each, as EXPERIMENTS.md shows them.

Every measured number is a field, {row / column} of the experiment's table in results/cures.md: the
median over the seeds, or with `/ low` or `/ high` an end of their range. A format may follow, as in
{psi return / variance :,.0f}. cures.py writes the outcome into results/cures.md.
"""

import re
from statistics import median

from bench import table

FINDINGS = {
    "psi": "At one and the same policy the gradient's variance is {psi return / variance :,.0f} "
    "with the whole return, {psi reward-to-go / variance :,.0f} with reward-to-go, "
    "{psi baseline / variance :,.0f} with the baseline and {psi TD error / variance :,.0f} with "
    "the TD error; the true gradient's square is {psi baseline / gradient² :,.0f}. Only the TD "
    "error is biased (for the whole return {psi return / bias² :,.0f} was measured, which is "
    "noise), and the critic decides how far: its squared bias is "
    "{psi TD error / bias² :,.0f} ({psi TD error / bias² / low :,.0f} to "
    "{psi TD error / bias² / high :,.0f}) with a critic that has seen 50 rollouts of this policy, "
    "and {psi TD error / bias², rough critic :,.0f}, as much as the gradient itself, with one that "
    "has seen 2. After 100,000 steps of learning the greedy return is "
    "{psi return / greedy_return :.0f} with the whole return, in the worst seed "
    "{psi return / greedy_return / low :.0f}; with reward-to-go "
    "{psi reward-to-go / greedy_return :.0f} and {psi reward-to-go / greedy_return / low :.0f}, "
    "with the baseline {psi baseline / greedy_return :.0f} and "
    "{psi baseline / greedy_return / low :.0f}.",
    "bootstrap": "On CartPole REINFORCE with a baseline and the actor-critic need about as "
    "many steps until the mean return is 475: {script reinforce / steps to 475 :,.0f} "
    "({script reinforce / steps to 475 / low :,.0f} to "
    "{script reinforce / steps to 475 / high :,.0f}) and "
    "{script actor_critic / steps to 475 :,.0f} "
    "({script actor_critic / steps to 475 / low :,.0f} to "
    "{script actor_critic / steps to 475 / high :,.0f}). In updates of the policy it is "
    "{script reinforce / updates to 475 :.0f} and {script actor_critic / updates to 475 :.0f}. "
    "A guess: while the critic is rough, its bias costs what the smaller variance gains.",
    "step": "In one loop, where only the policy's step differs, the worst of five seeds ends at "
    "{form ppo, value 0.003 / greedy_return / low :.0f}, "
    "{form ppo, value 0.01 / greedy_return / low :.0f} and "
    "{form ppo, value 0.03 / greedy_return / low :.0f} with PPO at rates of 0.003, 0.01 and 0.03, "
    "at {form trpo, value 0.001 / greedy_return / low :.0f} and "
    "{form trpo, value 0.01 / greedy_return / low :.0f} with TRPO at δ 0.001 and 0.01, but with a "
    "plain policy-gradient step at "
    "{form plain step, value 0.003 / greedy_return / low :.0f}, "
    "{form plain step, value 0.01 / greedy_return / low :.0f} and "
    "{form plain step, value 0.03 / greedy_return / low :.0f} (its medians are "
    "{form plain step, value 0.003 / greedy_return :.0f}, "
    "{form plain step, value 0.01 / greedy_return :.0f} and "
    "{form plain step, value 0.03 / greedy_return :.0f}). "
    "PPO's 16 steps without the clip: "
    "{form no clip, value 0.001 / greedy_return / low :.0f} in the worst seed at 0.001 (median "
    "{form no clip, value 0.001 / greedy_return :.0f}), "
    "{form no clip, value 0.003 / greedy_return / low :.0f} at 0.003 (median "
    "{form no clip, value 0.003 / greedy_return :.0f}). Further out the clip does not help: PPO's "
    "worst seed is at {form ppo, value 0.001 / greedy_return / low :.0f} with 0.001 (median "
    "{form ppo, value 0.001 / greedy_return :.0f}) and lost with 0.1 (median "
    "{form ppo, value 0.1 / greedy_return :.0f}); TRPO's is at "
    "{form trpo, value 0.0001 / greedy_return / low :.0f} for δ 0.0001 and "
    "{form trpo, value 0.1 / greedy_return / low :.0f} for 0.1 (medians "
    "{form trpo, value 0.0001 / greedy_return :.0f} and "
    "{form trpo, value 0.1 / greedy_return :.0f}). Its step grows with √δ.",
    "lambda": "At λ = 0 the advantages have a squared bias of {/ bias² λ=0.0 :.0f} and a variance "
    "of {/ variance λ=0.0 :.0f}, as CartPole's next state follows from the action; at λ = 1 these "
    "are {/ bias² λ=1.0 :.1f} and {/ variance λ=1.0 :.1f}. On CartPole PPO learns fastest at "
    "λ = 1: the critic's bias costs more than the variance.",
    "clip": "After 4, 10 and 20 passes over each rollout the median (worst) seed ends at "
    "{form clip, epochs 4 / greedy_return :.0f} "
    "({form clip, epochs 4 / greedy_return / low :.0f}), "
    "{form clip, epochs 10 / greedy_return :.0f} "
    "({form clip, epochs 10 / greedy_return / low :.0f}) and "
    "{form clip, epochs 20 / greedy_return :.0f} "
    "({form clip, epochs 20 / greedy_return / low :.0f}) with the clip, at "
    "{form no clip, epochs 4 / greedy_return :.0f} "
    "({form no clip, epochs 4 / greedy_return / low :.0f}), "
    "{form no clip, epochs 10 / greedy_return :.0f} "
    "({form no clip, epochs 10 / greedy_return / low :.0f}) and "
    "{form no clip, epochs 20 / greedy_return :.0f} "
    "({form no clip, epochs 20 / greedy_return / low :.0f}) without it. One rollout then moves the "
    "policy by up to {form no clip, epochs 10 / kl_max :.1f} nats in 10 passes instead of "
    "{form clip, epochs 10 / kl_max :.2f}. The penalty of adaptive weight ends at "
    "{form penalty, epochs 4 / greedy_return :.0f} "
    "({form penalty, epochs 4 / greedy_return / low :.0f}), "
    "{form penalty, epochs 10 / greedy_return :.0f} "
    "({form penalty, epochs 10 / greedy_return / low :.0f}) and "
    "{form penalty, epochs 20 / greedy_return :.0f} "
    "({form penalty, epochs 20 / greedy_return / low :.0f}).",
    "surrogate": "Drawn from the scripts' own code. With A = 1 PPO's objective is "
    "{method PPO / A+ r=1.1 :.1f} at r = 1.1, and at r = 2 only {method PPO / A+ r=2.0 :.1f}; with "
    "A = −1 it falls on, to {method PPO / A- r=2.0 :.0f}: a bad action made likelier is pushed "
    "back in full. At r = 2 and A > 0 the gradient of a token counts {method RLOO / A+ r=2.0 :.0f} "
    "time in RLOO, which knows no ratio, {method GRPO / A+ r=2.0 :.0f} times in GRPO, and "
    "{method CISPO / A+ r=2.0 :.1f} times in CISPO, which bounds the weight and keeps the "
    "gradient. In GSPO one token of 20 moves their mean so little that at r = 0.5 it still counts "
    "{method GSPO / A+ r=0.5 :.2f} times; but bounds as narrow as its own silence the whole "
    "answer before r = 2.",
    "entropy": "On 11 stairs, where stopping pays 1 on average and the top "
    "{height 11, coefficient 1.0 / greedy_return :.1f}, the greedy return ends at "
    "{height 11, coefficient 0.0 / greedy_return :.1f} in the median without the bonus "
    "({height 11, coefficient 0.0 / greedy_return / low :.1f} to "
    "{height 11, coefficient 0.0 / greedy_return / high :.1f}), at "
    "{height 11, coefficient 0.1 / greedy_return :.1f} with a weight of 0.1 "
    "({height 11, coefficient 0.1 / greedy_return / low :.1f} to "
    "{height 11, coefficient 0.1 / greedy_return / high :.1f}), and in the worst seed at "
    "{height 11, coefficient 1.0 / greedy_return / low :.1f} with 1.0. Halfway the entropy on the "
    "first stair is {height 11, coefficient 0.0 / entropy halfway :.2f}, "
    "{height 11, coefficient 0.1 / entropy halfway :.2f} and "
    "{height 11, coefficient 1.0 / entropy halfway :.2f} nats. With 10 stairs the medians are "
    "{height 10, coefficient 0.0 / greedy_return :.1f}, "
    "{height 10, coefficient 0.1 / greedy_return :.1f} and "
    "{height 10, coefficient 1.0 / greedy_return :.1f}, the worst seeds "
    "{height 10, coefficient 0.0 / greedy_return / low :.1f}, "
    "{height 10, coefficient 0.1 / greedy_return / low :.1f} and "
    "{height 10, coefficient 1.0 / greedy_return / low :.1f}: the stairs were chosen so that it "
    "matters.",
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
    "hacking": "Without KL GRPO's reward climbs to {method GRPO, beta 0.0 / proxy :.2f}, while "
    "right answers, {method GRPO, beta 0.0 / best true :.2f} of all after "
    "{method GRPO, beta 0.0 / rollouts to best :.0f} rollouts, fall to "
    "{method GRPO, beta 0.0 / true :.2f} (at best {method GRPO, beta 0.0 / true / high :.2f}): the "
    "policy lists running totals over {method GRPO, beta 0.0 / tokens :.0f} of 24 tokens, and no "
    "room is left for the answer. With RLOO they fall to "
    "{method RLOO, 4 steps, beta 0.0 / true :.2f}. With a β of 0.3 "
    "{method GRPO, beta 0.3 / true :.2f} are right at the end with KL in the loss and "
    "{method RLOO, 4 steps, beta 0.3 / true :.2f} with KL in the reward (at worst "
    "{method GRPO, beta 0.3 / true / low :.2f} and "
    "{method RLOO, 4 steps, beta 0.3 / true / low :.2f}), "
    "{method GRPO, beta 0.3 / KL of an answer :.1f} and "
    "{method RLOO, 4 steps, beta 0.3 / KL of an answer :.1f} nats an answer from the reference "
    "instead of {method GRPO, beta 0.0 / KL of an answer :.1f} and "
    "{method RLOO, 4 steps, beta 0.0 / KL of an answer :.1f}. β 0.1 is too little "
    "({method GRPO, beta 0.1 / true :.2f} and {method RLOO, 4 steps, beta 0.1 / true :.2f}), and β "
    "1 keeps the policy from learning, too ({method GRPO, beta 1.0 / true :.2f} and "
    "{method RLOO, 4 steps, beta 1.0 / true :.2f}). GRPO without KL, stopped at its best, would do "
    "nearly as well as with β 0.3.",
    "critic": "To be 90 % right takes PPO with a critic {method PPO 1 / rollouts to 0.9 :.0f} "
    "rollouts ({method PPO 1 / rollouts to 0.9 / low :.0f} to "
    "{method PPO 1 / rollouts to 0.9 / high :.0f}), GRPO "
    "{method GRPO / rollouts to 0.9 :.0f} ({method GRPO / rollouts to 0.9 / low :.0f} to "
    "{method GRPO / rollouts to 0.9 / high :.0f}), and PPO with the batch mean instead of a "
    "critic {method PPO 1, no critic / rollouts to 0.9 :.0f} "
    "({method PPO 1, no critic / rollouts to 0.9 / low :.0f} to "
    "{method PPO 1, no critic / rollouts to 0.9 / high :.0f}): neither critic nor group is missed "
    "on answers this short. When half of the answers are right the critic, trained at the policy's "
    "rate, explains {method PPO 1 / explained at half right :.0%} of the variance of the "
    "rewards, at the end {method PPO 1 / explained at the end :.0%}. It doubles the training "
    "state, from {method GRPO / megabytes :.1f} to {method PPO 1 / megabytes :.1f} MB, and a "
    "rollout with its updates takes {method PPO 1 / seconds a rollout :.2f} s with it and "
    "{method PPO 1, no critic / seconds a rollout :.2f} s without. 256 questions once each "
    "instead of 32 eight times take {method PPO 0.95, no groups / rollouts to 0.9 :.0f} rollouts "
    "with the critic (λ 0.95) and {method PPO 1, no critic, no groups / rollouts to 0.9 :.0f} "
    "without: this small gain is not the critic's.",
    "length": "GRPO gives a token of a long answer less weight, right or wrong; Dr. GRPO does not. "
    "So wrong answers should grow and right ones shrink. Wrong ones hardly grow: from "
    "{method GRPO / wrong at the start :.1f} tokens to {method GRPO / wrong, second half :.1f} "
    "({method GRPO / wrong, second half / low :.1f} to "
    "{method GRPO / wrong, second half / high :.1f}); Dr. GRPO's go to "
    "{method Dr. GRPO / wrong, second half :.1f} "
    "({method Dr. GRPO / wrong, second half / low :.1f} to "
    "{method Dr. GRPO / wrong, second half / high :.1f}). Right ones do shrink, from "
    "{method GRPO / right at the start :.1f} to {method GRPO / right, second half :.1f} "
    "({method GRPO / right, second half / low :.1f} to "
    "{method GRPO / right, second half / high :.1f}), but so do Dr. GRPO's, to "
    "{method Dr. GRPO / right, second half :.1f} "
    "({method Dr. GRPO / right, second half / low :.1f} to "
    "{method Dr. GRPO / right, second half / high :.1f}), without that weight.",
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
    "bootstrap": NOT_SHOWN,
    "step": SHOWN,
    "lambda": PARTLY,
    "surrogate": SHOWN,
    "clip": SHOWN,
    "entropy": SHOWN,
    "baseline": PARTLY,
    "critic": SHOWN,
    "passes": SHOWN,
    "hacking": SHOWN,
    "length": NOT_SHOWN,
    "difficulty": PARTLY,
    "cliphigher": PARTLY,
    "dynamic": SHOWN,
    "ratio": PARTLY,
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
