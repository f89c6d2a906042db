"""Settings of the tests of this folder."""

from tests.threads import one_thread  # noqa: F401
