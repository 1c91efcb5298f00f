"""The package as a whole."""

import scrimp


def test_every_public_name_exists() -> None:
    """Each name in ``__all__`` can be reached."""
    assert all(hasattr(scrimp, name) for name in scrimp.__all__)
