"""The exceptions whose message is meant for the user.

`UserError` carries a sentence that says what was given, what was expected and what to change. Command lines print
that sentence once and exit with status 2, or 69 where another rank is lost; anything else that escapes is a defect and
keeps its traceback.
"""


class UserError(ValueError):
    """An error in the user's input; the message is the whole explanation, one sentence, without a traceback."""


class LostRankError(UserError):
    """Another rank is gone or does not answer. That rank's own error is the cause, and should be printed first."""
