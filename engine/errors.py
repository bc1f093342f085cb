"""The one exception that is meant for the person at the keyboard.

`UserError` carries a sentence that says what was given, what was expected and what to change. Command lines print
that sentence once and exit with status 2; anything else that escapes is a defect and keeps its traceback.
"""


class UserError(ValueError):
    """Something the user gave cannot work; the message is the whole explanation, one sentence, no traceback needed."""


class LostRankError(UserError):
    """Another rank is gone or does not answer. That rank's own last words are the cause, and should be seen first."""
