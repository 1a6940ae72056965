"""The product's errors: a user can mend each of them, and the command line maps them to exit codes."""


class UserError(Exception):
    """Wrong input, options, configuration or credentials; the message says which, and what to do."""

    exit_code = 3
