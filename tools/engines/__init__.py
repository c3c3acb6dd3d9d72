"""`make engines`: one job on every Beam engine there is here, whole or killed and resumed, writes the same bytes."""
