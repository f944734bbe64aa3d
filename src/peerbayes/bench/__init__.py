"""Speed and memory on this machine: engines, a point pair, bayesian-torch, prediction, shared weights, and growth.

Images are random. In a record ``figures`` is a function of ``measurements`` alone.
"""
