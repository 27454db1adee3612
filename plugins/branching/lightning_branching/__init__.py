"""Recorded rollouts run again: whole, with their model calls answered from the record, or as branches from one call on."""
