"""What our generated homes are made of: rooms, furniture, things, and where things are kept.

The tables are ours. They follow common sense rather than a simulator: each thing lists the places
it may stand in, with a weight that says how usual the place is, so that a player who knows homes
finds things sooner than one who searches blindly.
"""

from __future__ import annotations

import dataclasses

APPLIANCES = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}
"""The receptacle that a task of the kind is done with."""

LAMP = "DeskLamp"

OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """A room: receptacle types that are always there once, and how many of others there may be.

    Attributes:
      name: of the room.
      always: receptacle types present exactly once in every room of the kind.
      maybe: receptacle type -> largest number of it.
    """

    name: str
    always: tuple[str, ...]
    maybe: dict[str, int]

    def holds(self, receptacle: str) -> bool:
        """Whether receptacles of the type may stand here."""
        return receptacle in self.always or receptacle in self.maybe


ROOMS = {
    room.name: room
    for room in (
        Room(
            name="kitchen",
            always=("Fridge", "Microwave", "SinkBasin"),
            maybe={
                "CounterTop": 3, "Cabinet": 6, "Drawer": 5, "Shelf": 3, "StoveBurner": 4,
                "DiningTable": 1, "SideTable": 1, "CoffeeMachine": 1, "Toaster": 1,
                "GarbageCan": 1,
            },
        ),
        Room(
            name="bedroom",
            always=("Bed",),
            maybe={
                "Desk": 2, "Drawer": 6, "Shelf": 6, "SideTable": 2, "Dresser": 1, "Safe": 1,
                "ArmChair": 1, "GarbageCan": 1, "LaundryHamper": 1, "Cabinet": 3,
            },
        ),
        Room(
            name="bathroom",
            always=("SinkBasin", "Toilet"),
            maybe={
                "CounterTop": 1, "Cabinet": 6, "Drawer": 5, "Shelf": 4, "BathtubBasin": 1,
                "TowelHolder": 2, "HandTowelHolder": 2, "ToiletPaperHanger": 1,
                "GarbageCan": 1, "SideTable": 1,
            },
        ),
        Room(
            name="livingroom",
            always=("Sofa",),
            maybe={
                "ArmChair": 2, "CoffeeTable": 2, "SideTable": 3, "TVStand": 1, "Shelf": 5,
                "Drawer": 5, "Cabinet": 4, "Dresser": 1, "DiningTable": 1, "Safe": 1,
                "Ottoman": 1, "GarbageCan": 1,
            },
        ),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    """A type of object.

    Attributes:
      name: of the type.
      rooms: names of the rooms it is found in.
      homes: receptacle type -> weight; the types that can hold it, and how usual each is.
      cleanable, heatable, coolable, sliceable: what can be done with it.
      is_container: it is itself a vessel (seen only in how it is described).
    """

    name: str
    rooms: frozenset[str]
    homes: dict[str, int]
    cleanable: bool = False
    heatable: bool = False
    coolable: bool = False
    sliceable: bool = False
    is_container: bool = False


_ROOM_LETTERS = {"k": "kitchen", "b": "bedroom", "a": "bathroom", "l": "livingroom"}


def _thing(line: str) -> Thing:
    """Reads `Name rooms properties Place*weight Place ...` (a dash: no properties)."""
    name, rooms, properties, *places = line.split()
    homes = {}
    for place in places:
        receptacle, _, weight = place.partition("*")
        homes[receptacle] = int(weight or 1)
    return Thing(
        name=name,
        rooms=frozenset(_ROOM_LETTERS[letter] for letter in rooms),
        homes=homes,
        cleanable="w" in properties,
        heatable="h" in properties,
        coolable="c" in properties,
        sliceable="s" in properties,
        is_container="v" in properties,
    )


# Properties: w washable, h heatable, c coolable, s sliceable, v a vessel.
_THINGS = """
Apple k whcs Fridge*4 CounterTop*3 DiningTable*3 SideTable GarbageCan SinkBasin Microwave
Bread k hcs CounterTop*5 DiningTable*2 Fridge SideTable GarbageCan Microwave
Egg k whcs Fridge*6 CounterTop*2 SinkBasin GarbageCan Microwave DiningTable SideTable
Lettuce k wcs Fridge*5 CounterTop*3 DiningTable SinkBasin GarbageCan SideTable
Potato k whcs CounterTop*3 SinkBasin*2 Fridge*2 Microwave GarbageCan DiningTable SideTable
Tomato k whcs CounterTop*3 Fridge*3 SinkBasin Microwave DiningTable*2 GarbageCan SideTable
Mug k whcv CoffeeMachine*5 CounterTop*2 Cabinet*2 Shelf SinkBasin Microwave Fridge SideTable
Cup k whcv Cabinet*4 CounterTop*2 Shelf*2 SinkBasin*2 Fridge Microwave DiningTable SideTable
Plate k whcv Cabinet*3 CounterTop*2 DiningTable*3 SinkBasin*2 Shelf Fridge Microwave SideTable
Bowl k wcv Cabinet*4 CounterTop*2 DiningTable*2 SinkBasin*2 Shelf Fridge Microwave SideTable
Pan k wcv StoveBurner*6 Cabinet*2 CounterTop*2 SinkBasin Fridge DiningTable SideTable
Pot k wcv StoveBurner*6 Cabinet*2 CounterTop SinkBasin Shelf Fridge DiningTable SideTable
Kettle k w StoveBurner*4 CounterTop*2 Cabinet*2 Shelf DiningTable SinkBasin SideTable
Fork k w Drawer*6 CounterTop*2 DiningTable*2 SinkBasin*2 SideTable
Spoon k w Drawer*6 CounterTop*2 DiningTable*2 SinkBasin*2 SideTable
Knife k w Drawer*4 CounterTop*4 DiningTable SinkBasin SideTable
ButterKnife k w Drawer*5 CounterTop*2 DiningTable*2 SinkBasin SideTable
Spatula k w Drawer*5 CounterTop*3 SinkBasin DiningTable SideTable
Ladle k w Drawer*4 CounterTop*2 Cabinet*2 SinkBasin DiningTable
DishSponge k w SinkBasin*5 CounterTop*2 Drawer Cabinet Shelf GarbageCan
SaltShaker k - CounterTop*3 Cabinet*2 Shelf*2 Drawer*2 DiningTable SideTable
PepperShaker k - Cabinet*3 CounterTop*2 Shelf*2 Drawer*2 DiningTable SideTable
WineBottle k c Fridge*3 CounterTop*3 Cabinet*2 Shelf*2 DiningTable GarbageCan SideTable
AlarmClock b - SideTable*4 Desk*3 Dresser*2 Shelf
Pencil bl - Desk*5 Drawer*3 Shelf SideTable CoffeeTable Dresser GarbageCan
Pen bl - Desk*4 Drawer*3 SideTable*2 Shelf CoffeeTable Dresser GarbageCan
Book bl - Shelf*4 Bed*2 Desk*3 Sofa*2 CoffeeTable*2 ArmChair Drawer SideTable Dresser Ottoman
CD b - Desk*3 Shelf*3 Drawer*2 Dresser Safe SideTable GarbageCan
CellPhone bl - Bed*3 Desk*3 SideTable*2 Sofa*2 Dresser Drawer Safe CoffeeTable ArmChair Shelf
Laptop bl - Bed*3 Desk*5 Sofa*2 CoffeeTable*2 ArmChair SideTable Dresser DiningTable Ottoman
KeyChain bl - Drawer*2 SideTable*3 Dresser*2 Desk Safe*2 Sofa ArmChair CoffeeTable Shelf TVStand
CreditCard bl - Drawer*3 Desk*2 Dresser*2 Safe*2 Sofa ArmChair CoffeeTable SideTable Shelf
Pillow bl - Bed*5 Sofa*5 ArmChair*3 Ottoman
Watch bl - Drawer*2 Dresser*3 SideTable*3 Shelf CoffeeTable*2 Safe TVStand
RemoteControl l - Sofa*4 TVStand*4 CoffeeTable*4 ArmChair*2 Drawer SideTable Dresser Ottoman
Newspaper l - CoffeeTable*4 Sofa*4 ArmChair*2 DiningTable SideTable Drawer GarbageCan Ottoman
Box l v Sofa*2 DiningTable*2 CoffeeTable*2 ArmChair*2 Cabinet SideTable Shelf Dresser Ottoman
Vase l - Shelf*4 CoffeeTable*2 SideTable*2 DiningTable*2 Cabinet Safe TVStand Dresser
Statue l - Shelf*4 TVStand*2 SideTable*2 DiningTable CoffeeTable Dresser*2
TissueBox bal - SideTable*3 CoffeeTable*3 Toilet*2 Dresser Desk Shelf CounterTop Cabinet Drawer
Candle al - Toilet*3 CounterTop*3 Shelf*2 CoffeeTable*2 SideTable*2 Cabinet Drawer BathtubBasin
SoapBar a w BathtubBasin*4 SinkBasin*3 CounterTop*2 Toilet*2 Cabinet Drawer Shelf GarbageCan
SoapBottle a - CounterTop*4 Cabinet*2 Toilet*2 Shelf Drawer GarbageCan SideTable
SprayBottle a - Cabinet*4 Toilet*3 CounterTop*2 Shelf Drawer GarbageCan SideTable
ToiletPaper a - ToiletPaperHanger*5 Toilet*3 Cabinet*2 Drawer CounterTop Shelf GarbageCan
Cloth a w BathtubBasin*3 Cabinet*2 Drawer*2 CounterTop*2 SinkBasin*2 Toilet Shelf GarbageCan
HandTowel a - HandTowelHolder*6 CounterTop*2 SinkBasin Toilet Cabinet Drawer Shelf
Towel a - TowelHolder*6 BathtubBasin*2
DeskLamp bl - Desk*5 SideTable*5 Dresser*3 Shelf CoffeeTable DiningTable
"""

THINGS = {thing.name: thing for thing in map(_thing, _THINGS.strip().splitlines())}
