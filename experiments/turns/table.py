"""What the game's rewards can teach at best: a table learns it, in place of a network.

    python experiments/turns/table.py 15 4           # numbers, guesses

For each history of guesses and replies the table has one softmax over the numbers, even at first. A
network must first learn to tell histories apart. Advantages, the mean over guesses and Adam are
those of `game.toml`, with 8 groups of 8 games a step and the table's own learning rate. Prints, of
three seeds, the mean reward of every 50 steps.
"""

from __future__ import annotations

import random
import statistics
import sys

import numpy as np

GROUPS, GAMES, STEPS, EVERY, LEARNING_RATE = 8, 8, 300, 50, 0.2
History = tuple[tuple[int, bool], ...]


class Table:
    """The policy: a softmax for each history, over `numbers` numbers from 0."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        self.logits: dict[History, np.ndarray] = {}
        self.moments: dict[History, np.ndarray] = {}

    def chances(self, history: History) -> np.ndarray:
        """The chance of each number, (numbers,)."""
        powers = np.exp(self.logits.get(history, np.zeros(self.numbers)))
        return np.asarray(powers / powers.sum())

    def play(self, hidden: int, guesses: int, chance: random.Random) -> tuple[list[tuple[History, int]], float]:
        """Play a game. Returns its guesses, each with its history, and the reward."""
        moves: list[tuple[History, int]] = []
        history: History = ()
        while len(moves) < guesses:
            guess = chance.choices(range(self.numbers), self.chances(history).tolist())[0]
            moves.append((history, guess))
            if guess == hidden:
                return moves, 1.0
            history = (*history, (guess, hidden > guess))
        return moves, 0.0

    def climb(self, gradients: dict[History, np.ndarray], step: int) -> None:
        """Make step number `step`, from 1, of Adam with the trainer's betas."""
        for history, gradient in gradients.items():
            moments = self.moments.setdefault(history, np.zeros((2, self.numbers)))
            moments[:] = moments * [[0.9], [0.95]] + np.stack([0.1 * gradient, 0.05 * gradient**2])
            mean, square = moments[0] / (1 - 0.9**step), moments[1] / (1 - 0.95**step)
            self.logits[history] = self.logits.get(history, 0.0) + LEARNING_RATE * mean / (np.sqrt(square) + 1e-8)


def learned(numbers: int, guesses: int, seed: int) -> list[float]:
    """Train a table. Returns the mean reward of every `EVERY` steps."""
    table, chance, rewards = Table(numbers), random.Random(seed), []
    for step in range(1, STEPS + 1):
        moved: list[tuple[History, int, float]] = []
        for _ in range(GROUPS):
            hidden = chance.randrange(numbers)
            games = [table.play(hidden, guesses, chance) for _ in range(GAMES)]
            earned = [reward for _, reward in games]
            rewards += earned
            if len(set(earned)) > 1:
                mean, deviation = statistics.mean(earned), statistics.stdev(earned) + 1e-4
                moved += [(*move, (reward - mean) / deviation) for moves, reward in games for move in moves]
        gradients: dict[History, np.ndarray] = {}
        for history, guess, advantage in moved:
            towards = np.eye(numbers)[guess] - table.chances(history)
            gradients[history] = gradients.get(history, 0.0) + advantage * towards / len(moved)
        table.climb(gradients, step)
    return [statistics.mean(rewards[at : at + EVERY * GROUPS * GAMES]) for at in range(0, len(rewards), EVERY * GROUPS * GAMES)]


if __name__ == "__main__":
    for seed in (1, 2, 3):
        print(seed, *(f"{mean:.3f}" for mean in learned(int(sys.argv[1]), int(sys.argv[2]), seed)))
