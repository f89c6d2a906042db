"""Settings of the tests of this folder."""

from tests.one_rank import group  # noqa: F401
from tests.threads import one_thread  # noqa: F401
