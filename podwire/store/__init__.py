"""Stores: where the cluster's objects are kept, behind the contract of `model.store`; and documents from files."""
