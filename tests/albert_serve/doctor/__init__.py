import pytest

pytestmark = pytest.mark.process
