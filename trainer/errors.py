"""The two ways a run can fail on purpose: both end without a traceback.

A message answers, as far as each is known: where (file and line, or the flag), which key, what value, which rule it
breaks and how to mend it.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_RUN_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_HANG = 124
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class TrainerError(Exception):
    """Base of the errors that are shown to a user as one message.

    Args:
        rule: What is wrong, or the rule that the value breaks, as a sentence without its full stop.
        where: Where the value comes from, for example ``configs/a.yaml:12`` or ``flag --seed``.
        key: The dotted key, for example ``runner_config.batch_size``.
        value: The offending value; shown with ``repr``. Leave out when there is none.
        fix: What to do about it, as a sentence without its full stop.
    """

    exit_code = EXIT_RUN_FAILED
    _ABSENT = object()

    def __init__(self, rule: str, *, where: str = "", key: str = "", value: object = _ABSENT, fix: str = "") -> None:
        self.rule, self.where, self.key, self.fix, self._given = rule, where, key, fix, value
        self.value = None if value is self._ABSENT else value
        subject = key if value is self._ABSENT else f"{key or 'value'} = {value!r}"
        message = ": ".join(part for part in (where, subject, rule) if part) + "."
        super().__init__(message + (f"\n  Fix: {fix}." if fix else ""))

    def at(self, where: str, key: str = "") -> TrainerError:
        """The same error, with the place, and where given the key, that only a caller knew."""
        return type(self)(self.rule, where=where, key=key or self.key, value=self._given, fix=self.fix)


class UserError(TrainerError):
    """Bad input that is known before the run starts: exit code 2."""

    exit_code = EXIT_BAD_INPUT


class RunError(TrainerError):
    """A failure that only the run can know (a NaN loss, a full disk): exit code 1."""

    exit_code = EXIT_RUN_FAILED
