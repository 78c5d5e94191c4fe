"""sfdd: train draft models on the half of the data that teaches them.

Data flows one way, and the packages are its stations:

    conversations -> targets -> scoring -> filtering -> training -> evaluation
"""

__version__ = "0.1.0"
