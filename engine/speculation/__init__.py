"""The drafters, behind one protocol (`base.py`); `factory.py` alone maps a method's name to a class."""
