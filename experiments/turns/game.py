"""A game of hidden state: a number from 1 to 7 that three guesses are to find."""

import re


class Game:
    """Tells whether the number is higher or lower. A game pays 1 if the number was found."""

    def reply(self, task, turns):
        """What the policy reads after its newest guess; None: the game is over."""
        guess, number = guess_of(turns[-1]), int(task.task.answer)
        if guess == number:
            return None
        return "say a number" if guess is None else "higher" if number > guess else "lower"

    def score(self, task, turns):
        """The reward, and whether the number was found."""
        found = guess_of(turns[-1]) == int(task.task.answer)
        return float(found), found


def guess_of(turn):
    """The number that a turn is; None for other texts."""
    return int(turn.strip()) if re.fullmatch(r"[0-9]{1,2}", turn.strip()) else None
