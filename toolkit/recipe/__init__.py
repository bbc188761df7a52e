"""The recipe: schema, loading, and the origin of every value."""

from toolkit.recipe.base import Section
from toolkit.recipe.errors import COMMAND_LINE, DEFAULT, RecipeError, origin_of
from toolkit.recipe.files import list_recipes, recipe_folders, shipped_recipes
from toolkit.recipe.load import Loaded, load
from toolkit.recipe.overrides import split_arguments
from toolkit.recipe.problem import Problem
from toolkit.recipe.schema import Recipe, sections
from toolkit.recipe.spelling import did_you_mean

__all__ = [
    "COMMAND_LINE",
    "DEFAULT",
    "Loaded",
    "Problem",
    "Recipe",
    "RecipeError",
    "Section",
    "did_you_mean",
    "list_recipes",
    "load",
    "origin_of",
    "recipe_folders",
    "sections",
    "shipped_recipes",
    "split_arguments",
]
