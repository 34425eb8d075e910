"""A single-player game of TextArena (`pip install textarena==0.7.4`), played by the policy's turns.

    python textarena_game.py > games.jsonl       # the rules as question, a seed as answer

[[tasks]]
path = "games.jsonl"
environment = "textarena_game.py:Mastermind"
max_turns = 10
"""

import json
from importlib.metadata import version

import textarena

if version("textarena") != "0.7.4":
    # Nodes compare this file. So it says with which version they play the same game.
    raise ImportError("textarena_game.py plays textarena 0.7.4: pip install textarena==0.7.4")


class Mastermind:
    """A game begins anew from its seed for each turn: what it says depends on the turns alone."""

    game = "Mastermind-v0"

    def reply(self, task, turns):
        """What the game said to the newest turn; None: it is over."""
        said, _, rewards = self.played(task.task.answer, turns)
        return None if rewards else said

    def score(self, task, turns):
        """What the game pays in the end, and whether it was won; 0 for one that goes on."""
        reward = (self.played(task.task.answer, turns)[2] or {0: 0.0})[0]
        return float(reward), reward >= 1

    def played(self, seed, turns):
        """The newest words of the game, the rules, and its rewards if it is over."""
        env = textarena.make(self.game)
        env.reset(num_players=1, seed=int(seed))
        _, rules = env.get_observation()
        before, said = rules, ""
        for turn in turns:
            done, _ = env.step(turn[:2000])
            if done:
                return "", rules, env.close()[0]
            _, now = env.get_observation()
            # An observation may have all that was said, or only what is new.
            said = now.removeprefix(before).rpartition("[GAME]")[2].strip()
            before = now
        return said, rules, None


if __name__ == "__main__":
    for number in range(1000):
        text = Mastermind().played(number, [])[1].replace("[GAME]", "").strip()
        print(json.dumps({"question": f"Game {number}. {text}", "answer": number}))
