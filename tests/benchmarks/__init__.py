import pytest

pytestmark = [pytest.mark.process, pytest.mark.extended]
