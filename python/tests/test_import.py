import plumb


def test_error_is_a_runtime_error():
    assert issubclass(plumb.Error, RuntimeError)
