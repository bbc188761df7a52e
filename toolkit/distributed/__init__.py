"""The recipe in the engines' terms: batch layout, dtypes, engine settings, TrainingArguments, environment, launchers.

Without torch, so that what will run can be shown, checked and planned at once; only `rendezvous` imports it.
"""
