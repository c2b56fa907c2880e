"""verl-otb"""
__version__ = "0.1.0"
