"""Realization: bring resolved policy into the datapath, slot by slot, and report the outcome."""
