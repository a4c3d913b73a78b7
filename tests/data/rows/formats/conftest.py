"""The folder and the cache of the tests of sources."""

from tests.data.rows.conftest import folder, offline_and_own_cache  # noqa: F401
