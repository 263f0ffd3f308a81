"""Stores: where the cluster's objects are, behind the contract of `model.store`; and documents from files."""
