"""`make engines`: one job writes the same bytes on every Beam engine installed here, also if killed and resumed."""
