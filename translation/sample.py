"""160 German-English sentence pairs, written for this project, so that everything runs without a download.

Enough to see the parts work together, far too little to learn to translate.
"""

SAMPLE = (
    ("Ein Mann liest auf einer Parkbank die Zeitung.", "A man is reading the newspaper on a park bench."),
    (
        "Zwei Kinder bauen am Strand eine große Burg aus Sand.",
        "Two children are building a big sandcastle on the beach.",
    ),
    ("Eine Frau im roten Mantel wartet auf den Bus.", "A woman in a red coat is waiting for the bus."),
    (
        "Der Hund läuft mit einem Stock im Maul über die Wiese.",
        "The dog runs across the meadow with a stick in its mouth.",
    ),
    (
        "Drei Freunde sitzen am Tisch und spielen Karten.",
        "Three friends are sitting at the table playing cards.",
    ),
    ("Ein Mädchen gießt die Blumen auf dem Balkon.", "A girl is watering the flowers on the balcony."),
    ("Der Bäcker holt frisches Brot aus dem Ofen.", "The baker takes fresh bread out of the oven."),
    (
        "Eine Katze schläft auf der Fensterbank in der Sonne.",
        "A cat is sleeping on the windowsill in the sun.",
    ),
    ("Ein Junge fährt mit dem Fahrrad durch eine Pfütze.", "A boy rides his bicycle through a puddle."),
    ("Die Straße ist nach dem Regen noch nass.", "The street is still wet after the rain."),
    ("Ein alter Mann füttert die Enten am See.", "An old man is feeding the ducks at the lake."),
    ("Zwei Frauen unterhalten sich vor einem Café.", "Two women are talking in front of a café."),
    ("Ein Kind hält einen blauen Luftballon in der Hand.", "A child is holding a blue balloon in its hand."),
    ("Der Koch schneidet Zwiebeln in einer kleinen Küche.", "The cook is cutting onions in a small kitchen."),
    ("Eine Familie macht ein Picknick unter einem Baum.", "A family is having a picnic under a tree."),
    ("Ein Mann mit Bart repariert ein altes Radio.", "A man with a beard is repairing an old radio."),
    (
        "Mehrere Leute stehen vor dem Kino in der Schlange.",
        "Several people are standing in line outside the cinema.",
    ),
    ("Das Baby lacht über den kleinen Hund.", "The baby is laughing at the little dog."),
    (
        "Eine junge Frau spielt in der Fußgängerzone Geige.",
        "A young woman is playing the violin in the pedestrian zone.",
    ),
    ("Ein Bauer fährt mit dem Traktor über das Feld.", "A farmer is driving the tractor across the field."),
    (
        "Die Schüler malen mit Kreide auf den Schulhof.",
        "The pupils are drawing on the schoolyard with chalk.",
    ),
    (
        "Ein Mann trägt zwei schwere Koffer die Treppe hinauf.",
        "A man is carrying two heavy suitcases up the stairs.",
    ),
    ("Ein weißes Pferd steht hinter dem Zaun.", "A white horse is standing behind the fence."),
    ("Die Großmutter backt einen Kuchen mit Äpfeln.", "The grandmother is baking a cake with apples."),
    ("Zwei Männer heben ein Sofa in einen Lastwagen.", "Two men are lifting a sofa into a truck."),
    ("Ein Mädchen mit Zöpfen springt über ein Seil.", "A girl with braids is jumping over a rope."),
    ("Der Bus hält an der nächsten Ecke.", "The bus stops at the next corner."),
    (
        "Eine Frau kauft auf dem Markt Tomaten und Gurken.",
        "A woman is buying tomatoes and cucumbers at the market.",
    ),
    ("Ein Kellner bringt den Gästen zwei Tassen Kaffee.", "A waiter brings the guests two cups of coffee."),
    (
        "Die Kinder werfen Schneebälle auf ihren Vater.",
        "The children are throwing snowballs at their father.",
    ),
    ("Ein Mann schläft mit offenem Mund im Zug.", "A man is sleeping on the train with his mouth open."),
    ("Eine Ärztin spricht mit einem jungen Patienten.", "A doctor is talking to a young patient."),
    ("Ein Vogel sitzt auf dem Dach der Kirche.", "A bird is sitting on the roof of the church."),
    ("Der Junge im grünen Hemd schießt ein Tor.", "The boy in the green shirt scores a goal."),
    (
        "Zwei Arbeiter mit gelben Helmen stehen auf einem Gerüst.",
        "Two workers with yellow helmets are standing on a scaffold.",
    ),
    (
        "Eine Frau telefoniert, während sie die Straße überquert.",
        "A woman is talking on the phone while she crosses the street.",
    ),
    ("Das kleine Boot schaukelt auf den Wellen.", "The little boat is rocking on the waves."),
    ("Ein Paar tanzt auf einer Hochzeit.", "A couple is dancing at a wedding."),
    ("Ein Fischer flickt am Hafen sein Netz.", "A fisherman is mending his net at the harbour."),
    ("Die Lehrerin schreibt ein Wort an die Tafel.", "The teacher writes a word on the board."),
    ("Ein Mann im Anzug rennt zum Bahnhof.", "A man in a suit is running to the station."),
    ("Zwei Hunde streiten sich um einen Ball.", "Two dogs are fighting over a ball."),
    ("Eine Frau mit Brille näht ein Kleid.", "A woman with glasses is sewing a dress."),
    ("Ein kleiner Junge versteckt sich hinter dem Vorhang.", "A little boy is hiding behind the curtain."),
    ("Der Zug fährt langsam über die alte Brücke.", "The train is slowly crossing the old bridge."),
    ("Die Touristen fotografieren das Schloss.", "The tourists are taking pictures of the castle."),
    ("Ein Mädchen liest ihrem Bruder ein Märchen vor.", "A girl is reading a fairy tale to her brother."),
    (
        "Ein Maler steht auf einer Leiter und streicht die Wand.",
        "A painter is standing on a ladder and painting the wall.",
    ),
    ("Eine Gruppe von Wanderern ruht sich auf einem Felsen aus.", "A group of hikers is resting on a rock."),
    ("Das Kind hat Schokolade im Gesicht.", "The child has chocolate on its face."),
    ("Ein Straßenmusiker stimmt seine Gitarre.", "A street musician is tuning his guitar."),
    (
        "Zwei ältere Frauen gehen mit Regenschirmen spazieren.",
        "Two elderly women are going for a walk with umbrellas.",
    ),
    ("Ein Feuerwehrmann rettet eine Katze vom Baum.", "A firefighter rescues a cat from the tree."),
    ("Die Frau stellt eine Vase auf den Tisch.", "The woman is putting a vase on the table."),
    ("Ein Mann hackt hinter dem Haus Holz.", "A man is chopping wood behind the house."),
    ("Die Mannschaft feiert ihren Sieg auf dem Platz.", "The team is celebrating its victory on the field."),
    ("Ein Mädchen in Gummistiefeln sucht Muscheln.", "A girl in rubber boots is looking for shells."),
    ("Der Verkäufer wiegt die Trauben.", "The salesman is weighing the grapes."),
    ("Ein Läufer trinkt am Straßenrand Wasser.", "A runner is drinking water at the side of the road."),
    ("Eine schwarze Kuh frisst Gras auf der Weide.", "A black cow is eating grass in the pasture."),
    (
        "Ein Vater trägt seine Tochter auf den Schultern.",
        "A father is carrying his daughter on his shoulders.",
    ),
    ("Zwei Jungen klettern über eine Mauer.", "Two boys are climbing over a wall."),
    ("Die Friseurin schneidet einem Kunden die Haare.", "The hairdresser is cutting a customer's hair."),
    ("Ein Mann sitzt allein am Ufer und angelt.", "A man is sitting alone on the bank, fishing."),
    ("Ein gelbes Auto parkt vor der Bäckerei.", "A yellow car is parked in front of the bakery."),
    (
        "Eine Frau schiebt einen Kinderwagen durch den Park.",
        "A woman is pushing a stroller through the park.",
    ),
    ("Der Postbote wirft einen Brief in den Kasten.", "The postman drops a letter into the box."),
    ("Drei Mädchen singen auf einer kleinen Bühne.", "Three girls are singing on a small stage."),
    (
        "Ein Schwimmer springt vom hohen Turm ins Becken.",
        "A swimmer jumps from the high tower into the pool.",
    ),
    ("Ein Mann wäscht am Samstag sein Auto.", "A man is washing his car on Saturday."),
    ("Das Mädchen zeigt mit dem Finger auf den Mond.", "The girl is pointing her finger at the moon."),
    ("Ein Kamel trägt einen Reiter durch die Wüste.", "A camel is carrying a rider through the desert."),
    (
        "Zwei Frauen joggen früh am Morgen am Fluss entlang.",
        "Two women are jogging along the river early in the morning.",
    ),
    (
        "Ein Polizist regelt den Verkehr an der Kreuzung.",
        "A police officer is directing traffic at the intersection.",
    ),
    ("Der kleine Hund trägt einen Pullover.", "The little dog is wearing a sweater."),
    ("Eine Frau mit Hut riecht an einer Rose.", "A woman with a hat is smelling a rose."),
    ("Die Kinder essen Eis vor dem Brunnen.", "The children are eating ice cream in front of the fountain."),
    ("Ein Mann spielt mit seinem Sohn Schach.", "A man is playing chess with his son."),
    (
        "Ein Radfahrer mit rotem Helm fährt den Berg hinunter.",
        "A cyclist with a red helmet is riding down the mountain.",
    ),
    (
        "Viele Menschen sitzen bei schönem Wetter im Biergarten.",
        "Many people are sitting in the beer garden in fine weather.",
    ),
    ("Ich habe meinen Schlüssel im Büro vergessen.", "I left my key at the office."),
    ("Wann fährt der nächste Zug nach Köln?", "When does the next train to Cologne leave?"),
    ("Heute ist es viel kälter als gestern.", "Today it is much colder than yesterday."),
    ("Sie trinkt ihren Tee immer ohne Zucker.", "She always drinks her tea without sugar."),
    ("Könnten Sie mir bitte das Salz geben?", "Could you please pass me the salt?"),
    ("Wir haben den ganzen Abend über alte Zeiten geredet.", "We talked about old times all evening."),
    ("Mein Bruder wohnt seit drei Jahren in München.", "My brother has lived in Munich for three years."),
    ("Das Fenster lässt sich nicht öffnen.", "The window cannot be opened."),
    ("Er hat gestern sein altes Auto verkauft.", "He sold his old car yesterday."),
    ("Die Suppe schmeckt besser, wenn sie heiß ist.", "The soup tastes better when it is hot."),
    ("Niemand wusste, wo der Lehrer war.", "Nobody knew where the teacher was."),
    ("Am Sonntag besuchen wir meine Großeltern.", "On Sunday we are visiting my grandparents."),
    ("Das Museum öffnet um zehn Uhr.", "The museum opens at ten o'clock."),
    ("Ich muss morgen früh aufstehen.", "I have to get up early tomorrow."),
    ("Er spricht langsam, damit ihn alle verstehen.", "He speaks slowly so that everyone understands him."),
    ("Die Kinder dürfen heute länger aufbleiben.", "The children are allowed to stay up longer today."),
    ("Hast du meine grüne Tasche gesehen?", "Have you seen my green bag?"),
    ("Der Film war länger, als ich dachte.", "The film was longer than I thought."),
    ("Im Winter wird es hier schon um fünf dunkel.", "In winter it gets dark here as early as five."),
    ("Sie hat das Buch in zwei Tagen gelesen.", "She read the book in two days."),
    ("Leider ist das Konzert ausverkauft.", "Unfortunately, the concert is sold out."),
    ("Wir suchen eine Wohnung mit Garten.", "We are looking for a flat with a garden."),
    ("Der Arzt hat ihr geraten, mehr zu schlafen.", "The doctor advised her to sleep more."),
    ("Es hat die ganze Nacht geschneit.", "It snowed all night."),
    ("Mein Vater kocht jeden Freitag Fisch.", "My father cooks fish every Friday."),
    ("Bitte schließen Sie die Tür.", "Please close the door."),
    ("Ich weiß nicht, wie man dieses Spiel spielt.", "I do not know how to play this game."),
    ("Das Haus am Ende der Straße steht leer.", "The house at the end of the street is empty."),
    ("Sie freut sich auf ihren Urlaub am Meer.", "She is looking forward to her holiday by the sea."),
    ("Der Apfel ist vom Baum gefallen.", "The apple has fallen from the tree."),
    ("Er hat sich beim Skifahren das Bein gebrochen.", "He broke his leg while skiing."),
    (
        "Das ist der schönste Garten in der ganzen Stadt.",
        "This is the most beautiful garden in the whole town.",
    ),
    ("Nach dem Essen gehen wir eine Runde spazieren.", "After dinner we go for a short walk."),
    ("Die Bibliothek ist montags geschlossen.", "The library is closed on Mondays."),
    ("Wie viel kostet ein Kilo Kirschen?", "How much is a kilo of cherries?"),
    ("Sein Hemd ist blau, und seine Hose ist grau.", "His shirt is blue and his trousers are grey."),
    ("Meine Schwester lernt seit einem Jahr Englisch.", "My sister has been learning English for a year."),
    ("Der Kaffee ist zu heiß zum Trinken.", "The coffee is too hot to drink."),
    ("Wenn es regnet, bleiben wir zu Hause.", "If it rains, we will stay at home."),
    ("Er hört beim Arbeiten gern Musik.", "He likes to listen to music while working."),
    ("Die Nachbarn haben einen neuen Hund.", "The neighbours have a new dog."),
    ("Ich habe ihr zum Geburtstag Blumen geschenkt.", "I gave her flowers for her birthday."),
    ("Das Wasser im See ist klar und kalt.", "The water in the lake is clear and cold."),
    ("Unser Flug hatte zwei Stunden Verspätung.", "Our flight was two hours late."),
    ("Sie erzählte uns eine lustige Geschichte.", "She told us a funny story."),
    ("Der Schnee schmilzt langsam in der Sonne.", "The snow is slowly melting in the sun."),
    ("Gibt es hier in der Nähe eine Apotheke?", "Is there a pharmacy near here?"),
    ("Er öffnete den Brief mit einem Messer.", "He opened the letter with a knife."),
    ("Die Kirche wurde vor dreihundert Jahren gebaut.", "The church was built three hundred years ago."),
    ("Mir gefällt das kleinere Bild besser.", "I like the smaller picture better."),
    ("Zum Frühstück isst sie Brot mit Käse.", "She eats bread with cheese for breakfast."),
    ("Die Uhr an der Wand geht fünf Minuten vor.", "The clock on the wall is five minutes fast."),
    ("Der Wind hat meinen Hut in den Fluss geweht.", "The wind blew my hat into the river."),
    ("Alle Zimmer im Hotel sind belegt.", "All the rooms in the hotel are taken."),
    (
        "Ich treffe meine Freunde um acht vor dem Theater.",
        "I am meeting my friends outside the theatre at eight.",
    ),
    ("Das Mädchen möchte später Pilotin werden.", "The girl wants to become a pilot later."),
    ("Im Garten wachsen Möhren, Bohnen und Kürbisse.", "Carrots, beans and pumpkins grow in the garden."),
    ("Er sah müde aus, aber er lächelte.", "He looked tired, but he was smiling."),
    ("Die Straßenbahn ist heute Morgen voll.", "The tram is full this morning."),
    ("Hinter dem Haus beginnt der Wald.", "The forest begins behind the house."),
    ("Ein Frosch sitzt auf einem großen grünen Blatt.", "A frog is sitting on a big green leaf."),
    ("Zwei Tänzerinnen üben vor einem Spiegel.", "Two dancers are practising in front of a mirror."),
    ("Ein Mann mit Schürze grillt Würstchen im Hof.", "A man in an apron is grilling sausages in the yard."),
    ("Die Braut wirft ihren Strauß in die Menge.", "The bride throws her bouquet into the crowd."),
    (
        "Ein kleines Mädchen pustet die Kerzen auf der Torte aus.",
        "A little girl is blowing out the candles on the cake.",
    ),
    (
        "Ein Student schläft in der Bibliothek über seinen Büchern.",
        "A student is sleeping over his books in the library.",
    ),
    ("Die Wäsche hängt im Garten an der Leine.", "The laundry is hanging on the line in the garden."),
    ("Ein Junge lässt am Strand einen Drachen steigen.", "A boy is flying a kite on the beach."),
    (
        "Eine Ziege steht auf einem Stein und schaut in die Kamera.",
        "A goat is standing on a stone and looking at the camera.",
    ),
    (
        "Zwei Nachbarn reden über den Zaun miteinander.",
        "Two neighbours are talking to each other over the fence.",
    ),
    ("Eine Frau probiert im Laden ein Paar Schuhe an.", "A woman is trying on a pair of shoes in the shop."),
    ("Der Busfahrer winkt einem Kind zu.", "The bus driver is waving to a child."),
    (
        "Ein Mann zieht einen Schlitten durch den tiefen Schnee.",
        "A man is pulling a sledge through the deep snow.",
    ),
    (
        "Drei Kinder sitzen auf der Treppe und teilen sich eine Pizza.",
        "Three children are sitting on the stairs sharing a pizza.",
    ),
    (
        "Ein Gärtner schneidet die Hecke mit einer langen Schere.",
        "A gardener is trimming the hedge with long shears.",
    ),
    (
        "Abends leuchten die Lichter der Stadt am anderen Ufer.",
        "In the evening the lights of the city shine on the other bank.",
    ),
    (
        "Eine Frau im Rollstuhl wirft einen Ball in den Korb.",
        "A woman in a wheelchair throws a ball into the basket.",
    ),
    (
        "Der Clown bringt die Kinder im Krankenhaus zum Lachen.",
        "The clown makes the children in the hospital laugh.",
    ),
    (
        "Ein Paar steht auf der Brücke und schaut auf den Fluss.",
        "A couple is standing on the bridge looking at the river.",
    ),
    (
        "Im Keller steht noch das alte Fahrrad meiner Tante.",
        "My aunt's old bicycle is still in the basement.",
    ),
)


def split_sample(split: str) -> tuple[tuple[str, str], ...]:
    """(German, English) pairs of "train" (128), "val" (16) or "test" (16), the same ones each time.

    Of every ten pairs the first is for validation, the sixth for the test. Any name that starts with "test"
    is the test split. ValueError for another name.
    """
    if split == "val":
        return SAMPLE[::10]
    if split.startswith("test"):
        return SAMPLE[5::10]
    if split == "train":
        return tuple(pair for number, pair in enumerate(SAMPLE) if number % 5)
    raise ValueError(f"split {split!r}: must be train, val or test")
