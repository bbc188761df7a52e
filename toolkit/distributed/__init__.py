"""The recipe as engines are told it: batch layout, dtypes, engine settings, TrainingArguments, environment, launchers.

Without torch, so that what will run can be shown, checked and planned at once; only `rendezvous` imports it.
"""
